"""What a training learns from: windows of volumes, numbered samples, degradations, targets. No step is taken here."""
