"""A project of Django for the tests of `mqks.django`."""
