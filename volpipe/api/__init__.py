"""The public functions, as `import volpipe as vp` gives them. What they do is done in the packages below."""
