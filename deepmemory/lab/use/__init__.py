"""The use of trained networks: decoding, sound, export, inspection and the page of ``dmu play``."""
