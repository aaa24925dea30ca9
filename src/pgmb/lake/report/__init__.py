"""A report on a time of streams, queues and endpoints: one HTML page.

`gather` takes the figures, with Spark and from the database; `rules` finds what is unusual in them; `page`
makes the page. The last two are pure.
"""
