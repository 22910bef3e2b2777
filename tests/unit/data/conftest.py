from tests.unit.data.common import decoder, reachable

__all__ = ["decoder", "reachable"]
