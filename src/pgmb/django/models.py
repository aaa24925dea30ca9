"""What the admin shows. Nothing of it is created by migrations: `install` has done that."""

from __future__ import annotations

from django.db import models


class Queue(models.Model):
    """A row of pgmb.queue_status."""

    queue = models.TextField(primary_key=True)
    stream = models.TextField()
    waiting = models.BigIntegerField()
    oldest_age = models.DurationField(null=True)
    leased_events = models.BigIntegerField()
    retries = models.BigIntegerField()
    dead = models.BigIntegerField()
    paused_at = models.DateTimeField(null=True)

    class Meta:
        managed = False
        # Django quotes a name as a whole: so both of its parts are quoted.
        db_table = 'pgmb"."queue_status'

    def __str__(self) -> str:
        return str(self.queue)
