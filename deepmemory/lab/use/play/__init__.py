"""The page of ``dmu play``: a server for this machine only, and one page that loads nothing from elsewhere."""
