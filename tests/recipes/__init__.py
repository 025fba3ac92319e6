"""docs/recipes is true: each page's programs run, with the real libraries."""
