"""taskiq on MQKS: a broker, a result backend, and a source of schedules that the server keeps."""

from mqks.taskiq.broker import MqksBroker
from mqks.taskiq.results import MqksResultBackend
from mqks.taskiq.schedules import MqksScheduleSource

__all__ = ["MqksBroker", "MqksResultBackend", "MqksScheduleSource"]
