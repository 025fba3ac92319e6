"""Find the file systems and devices below a directory, as far as the kernel shows them."""
