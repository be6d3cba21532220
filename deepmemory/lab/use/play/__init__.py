"""The page of ``dmu play``: a server for this machine alone, and one page that needs nothing from elsewhere."""
