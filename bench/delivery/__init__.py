"""What delivery over HTTP is measured with: a bare client, dispatchers, and the server they post to."""
