"""Behind the background publisher: its batches, which refusals pass, and publishers that nobody closed."""
