"""What nothing decides by: recoveries, weight updates, CPU seconds."""
