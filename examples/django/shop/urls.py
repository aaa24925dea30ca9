"""One view: it creates an order and publishes that it was paid, both or neither."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from pgmb.django import app
from shop.models import Order


@transaction.atomic
def pay(request: HttpRequest, total: int) -> JsonResponse:
    order = Order.objects.create(total=total)
    app.publish("order.paid", {"id": order.pk})
    if total == 0:
        raise ValueError("nothing to pay")
    return JsonResponse({"id": order.pk})


urlpatterns = [path("pay/<int:total>", pay)]
