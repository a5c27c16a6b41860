"""An output beside a reference: scores of images and labels, and pictures of both. Nothing is judged by a net."""
