"""Dialects: what programs mean by the arrays and attributes that they store, beyond what the format says of them."""
