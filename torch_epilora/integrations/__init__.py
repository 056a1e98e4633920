"""Glue to other libraries; each module here imports its library, and the core imports none of them."""
