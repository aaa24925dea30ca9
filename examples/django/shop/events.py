"""Handlers: Django imports the module `events` of every application."""

from pgmb.django import app
from shop.models import Order


@app.on("order.paid")
def send_receipt(order: dict[str, int]) -> None:
    Order.objects.filter(id=order["id"]).update(receipt_sent=True)
