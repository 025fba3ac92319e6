"""A backend by somebody who is not kvio."""
