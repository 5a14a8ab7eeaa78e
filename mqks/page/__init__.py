"""The web page: what the broker holds, for people who would rather look than type.

The one rule: the page is a client. Everything it shows and does goes through the protocol, over a
connection inside the process, with the permissions of the user who looks.
"""
