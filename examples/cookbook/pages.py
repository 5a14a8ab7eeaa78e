# Asks for the pages of a site as one batch (docs/cookbook.md, Fan-out and fan-in).
import sys

import mqks

site, pages = sys.argv[1], int(sys.argv[2])
with mqks.blocking.connect() as client:
    done, failed = ("site.done", site), ("site.failed", site)
    with client.batch(site, then=done, on_dead=failed) as batch:
        batch.publish_many(("page.fetch", page) for page in range(pages))
