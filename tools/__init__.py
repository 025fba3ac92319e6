"""What the sessions of noxfile.py need beside installing and running."""
