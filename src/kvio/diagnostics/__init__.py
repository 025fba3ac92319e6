"""Programs that try storage and the backends on it, above the public interface."""
