"""What tries a machine: doctor and tuning."""
