"""How a program ends, or drops what it opened, with work under way."""
