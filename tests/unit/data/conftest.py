from tests.unit.data.common import reachable

__all__ = ["reachable"]
