"""The queues in Django's admin, to look at, with links into the dashboard."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html

from pgmb.django.models import Queue


@admin.register(Queue)
class QueueAdmin(admin.ModelAdmin):
    list_display = (
        "queue",
        "stream",
        "waiting",
        "oldest_age",
        "leased_events",
        "retries",
        "dead",
        "dashboard",
    )
    list_display_links = None
    ordering = ("queue",)

    @admin.display
    def dashboard(self, queue: Queue) -> str:
        """Where `pgmb serve` shows it: below the setting PGMB_DASHBOARD_URL."""
        url = str(getattr(settings, "PGMB_DASHBOARD_URL", "")).rstrip("/")
        if not url:
            return "-"
        return str(format_html('<a href="{}">open</a>', f"{url}/ui/queue?name={quote(queue.queue)}"))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.is_staff)
