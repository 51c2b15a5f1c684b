"""Two-tower retrieval: queries and candidates embedded apart, compared by a dot product."""
