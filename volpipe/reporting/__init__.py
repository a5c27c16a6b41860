"""The report of a run as one HTML file: what stands on it, charts by Vega, and how it is rendered by Jinja2."""
