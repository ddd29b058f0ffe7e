"""The status page: HTML and SVG that the daemon writes itself, readable without a script."""
