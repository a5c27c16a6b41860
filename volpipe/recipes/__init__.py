"""What users may set, typed, with defaults: recipes of runs, trainings, segmentations, workflows. Nothing is opened."""
