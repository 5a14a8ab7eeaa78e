"""huey on MQKS: `huey = MqksHuey("shop", url="mqks://localhost")`."""

from mqks.huey.instance import MqksHuey
from mqks.huey.storage import HueyStorage

__all__ = ["HueyStorage", "MqksHuey"]
