"""Numbers of whole volumes: scores of an output beside a reference, with pictures, and tables of measurements."""
