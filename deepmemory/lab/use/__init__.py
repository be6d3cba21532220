"""What trained networks are good for: decoding, sound, export, inspection, a page."""
