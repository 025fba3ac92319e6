"""What S3 does when the network or the server goes wrong: every library, fault and operation."""
