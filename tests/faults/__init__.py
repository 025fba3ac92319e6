"""The campaign: what a store survives, checked through its public interface and on the disk."""
