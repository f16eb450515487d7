"""Small programs that explain a technique; each runs by itself."""
