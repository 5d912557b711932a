"""Running a plan on the model."""
