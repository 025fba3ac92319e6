"""Every system call of kvio fails, is cut short, or is the last one of its process."""
