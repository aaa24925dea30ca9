"""What pgmb costs, against bare PostgreSQL and its peers: `python -m bench`, and the scorecard."""
