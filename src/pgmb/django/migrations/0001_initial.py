"""Only what Django knows of the models: `pgmb.django.apps.install` makes the schema before any migration."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[migrations.operations.base.Operation]] = [
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("queue", models.TextField(primary_key=True, serialize=False)),
                ("stream", models.TextField()),
                ("waiting", models.BigIntegerField()),
                ("oldest_age", models.DurationField(null=True)),
                ("leased_events", models.BigIntegerField()),
                ("retries", models.BigIntegerField()),
                ("dead", models.BigIntegerField()),
                ("paused_at", models.DateTimeField(null=True)),
            ],
            options={"db_table": 'pgmb"."queue_status', "managed": False},
        ),
    ]
