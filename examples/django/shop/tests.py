from django.test import TestCase

from pgmb.django.testing import assert_published, published
from shop.models import Order


class PayTest(TestCase):
    def test_a_payment_publishes(self) -> None:
        answer = self.client.get("/pay/5")
        assert_published("order.paid", {"id": answer.json()["id"]}, count=1)

    def test_a_failed_payment_publishes_nothing(self) -> None:
        with self.assertRaises(ValueError):
            self.client.get("/pay/0")
        self.assertEqual(published(), [])
        self.assertEqual(Order.objects.count(), 0)
