'use strict'
// Against a real broker: MQKS_URL, and MQKS_TLS_URL with MQKS_CA, and MQKS_USER_URL.
const assert = require('node:assert/strict')
const { execFile } = require('node:child_process')
const fs = require('node:fs')
const net = require('node:net')
const node = require('node:test')
const { promisify } = require('node:util')
const { connect: connected } = require('./mqks.js')

const URL_ = process.env.MQKS_URL
const test = (name, run, options) => node.test(name, { timeout: 40_000, ...options }, run)
const ended = []
const connect = async (...words) => {
  const client = await connected(...words)
  ended.push(client)
  return client
}
// What a test that has failed leaves open would keep the process.
node.afterEach(async () => {
  for (const each of ended.splice(0).reverse()) await Promise.resolve(each.close()).catch(() => {})
})
const QUICK = { reconnectMinMs: 10, reconnectMaxMs: 50 }
let count = 0
const unique = () => `q${process.pid}-${++count}`

/** A TCP proxy to the broker. `cut` ends its connections; while `isDeaf`, replies are dropped. */
function proxied() {
  const sockets = new Set()
  ended.push({ close: () => proxy.close() })
  const proxy = { isDeaf: false, accepted: 0, seen: '' }
  const to = new URL(URL_)
  const server = net.createServer((socket) => {
    proxy.accepted++
    const other = net.connect(to.port, to.hostname)
    for (const each of [socket, other]) sockets.add(each.on('error', () => {}))
    socket.on('data', (data) => (proxy.seen += data.toString('latin1')))
    socket.on('data', (data) => other.write(data)).on('close', () => other.destroy())
    other.on('data', (data) => proxy.isDeaf || socket.write(data)).on('close', () => socket.destroy())
  })
  proxy.cut = () => sockets.forEach((each) => each.destroy())
  proxy.close = () => (proxy.cut(), server.close())
  return new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(Object.assign(proxy, { url: `mqks://127.0.0.1:${server.address().port}` }))))
}

/** A peer that answers each line of a connection with what `answer` makes of it; a list of lines, or nothing. */
function peer(answer) {
  const peer = { accepted: 0, lines: [] }
  const server = net.createServer((socket) => {
    peer.accepted++
    let rest = ''
    socket.on('error', () => {}).on('data', (data) => {
      const lines = (rest + data.toString('latin1')).split('\n')
      rest = lines.pop()
      for (const line of lines) {
        peer.lines.push(line)
        for (const each of [answer(line.split(' '), socket) ?? []].flat()) socket.write(`${each}\n`)
      }
    })
  })
  ended.push({ close: () => server.close() })
  return new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(Object.assign(peer, { url: `mqks://127.0.0.1:${server.address().port}` }))))
}

async function until(look) {
  while (!(await look())) await new Promise((resolve) => setTimeout(resolve, 5))
}

test('data of every kind arrive', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q])
  const all = Buffer.from(Array.from({ length: 256 }, (_, each) => each))
  const sent = ['text  with spaces ', '', all, Buffer.from('x\r'), '\\n', { a: ['b\t\n', 1, null] }, 17, Buffer.from('a\\\nb')]
  const ids = []
  for (const data of sent) ids.push(await client.publish(q, data))
  const got = []
  for (const _ of sent) got.push(await consumer.receive())
  assert.deepEqual(got.map((each) => each.id), ids)
  const expected = sent.map((each) => (Buffer.isBuffer(each) || typeof each === 'string' ? Buffer.from(each) : Buffer.from(JSON.stringify(each))))
  assert.deepEqual(got.map((each) => each.data), expected)
  assert.deepEqual(got[5].json(), sent[5])
  await client.close()
})

test('buffers arrive as their bytes', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q])
  const whole = Uint8Array.from([0, 1, 254, 255, 10, 9, 13, 92])
  const views = [whole.buffer, new Uint16Array(whole.buffer), new Float64Array(whole.buffer), new DataView(whole.buffer, 2, 4), whole.subarray(1, 3)]
  for (const each of views) await client.publish(q, each)
  for (const [start, end] of [[0, 8], [0, 8], [0, 8], [2, 6], [1, 3]]) {
    assert.deepEqual((await consumer.receive()).data, Buffer.from(whole.subarray(start, end)))
  }
  await client.publish(q, { a: {}, b: [], c: Object.create(null), d: new Date(0) })
  assert.deepEqual((await consumer.receive()).json(), { a: {}, b: [], c: {}, d: '1970-01-01T00:00:00.000Z' })
})

test('a reply that is neither ok nor an error ends the client', async () => {
  const { url } = await peer(([id, action]) => `${id} ${action === 'ping' ? 'ok hello' : 'what'}`)
  const client = await connect(url, QUICK)
  await assert.rejects(client.publish('e', 'x'), { code: 'PROTOCOL', message: 'a reply is neither ok nor an error: what' })
})

test('what a message is published with is told', async () => {
  const client = await connect(URL_)
  const q = unique()
  await client.subscribe(q, [q])
  await client.publish(q, 'line 1\nline 2', { id: q, priority: 5, key: 'k, 1', meta: { 'a b': 'c,&=é', x: "!'()*" } })
  const [peeked] = await client.peek(q)
  const consumer = await client.consume(q)
  const message = await consumer.receive()
  for (const each of [peeked, message]) {
    assert.deepEqual([each.id, each.event, each.retry, each.priority, each.key, each.text], [q, q, 0, 5, 'k, 1', 'line 1\nline 2'])
    assert.deepEqual(each.meta, { 'a b': 'c,&=é', x: "!'()*" })
  }
  assert.equal(await message.ack({ confirm: true }), true)
  assert.equal(await message.ack(), false)
  assert.deepEqual(await client.peek(q), [])
  await client.close()
})

test('a unique message is dropped, or takes the place of another', async () => {
  const client = await connect(URL_)
  const q = unique()
  await client.subscribe(q, [q])
  const first = await client.publish(q, 'a', { unique: 'k, 1' })
  const dropped = await client.publishUnique(q, 'b', 'k, 1')
  assert.deepEqual([dropped.duplicateOf, dropped.replaced], [first, undefined])
  const second = await client.publishUnique(q, 'c', { key: 'k, 1', until: 'acked', for: 60, on: 'replace' })
  assert.deepEqual([second.duplicateOf, second.replaced], [undefined, first])
  const [peeked] = await client.peek(q)
  const consumer = await client.consume(q)
  const message = await consumer.receive()
  for (const each of [peeked, message]) assert.deepEqual([each.id, each.unique, each.text], [second.id, 'k, 1', 'c'])
  assert.equal((await client.publishUnique(q, 'd', 'k, 1')).duplicateOf, second.id)
  await assert.rejects(client.publishUnique(q, 'x', { key: 'k', until: 'never' }), { code: 'REFUSED' })
  await assert.rejects(client.publishUnique(q, 'x', { key: 'k', upTo: 1 }), { code: 'INVALID' })
  await client.close()
})

test('a job has progress and a result', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q], { cancellable: true })
  const job = await client.submit(q, { page: 7 })
  const message = await consumer.receive()
  assert.deepEqual([message.id, message.wantsResult, message.event, message.json()], [job.id, true, q, { page: 7 }])
  assert.equal((await client.peek(q))[0].event, q)
  assert.deepEqual(await job.state(), { state: 'running', hasEnded: false, queue: q })
  assert.equal(await job.progress(), undefined)
  assert.equal(await message.progress(40, '  colours\n and é ', { confirm: true }), true)
  assert.deepEqual(await job.state(), { state: 'running', hasEnded: false, queue: q, progress: 40, text: 'colours and é' })
  await assert.rejects(message.progress(101), { code: 'INVALID' })
  await assert.rejects(message.progress(1, 'é'.repeat(101)), { code: 'INVALID' })
  await assert.rejects(job.result({ timeoutMs: 1 }), { code: 'TIMEOUT' })
  const result = job.result()
  assert.equal(await message.ack({ result: { pages: ['é\n'] }, confirm: true }), true)
  assert.deepEqual(await result, { pages: ['é\n'] })
  assert.equal(await message.progress(50), false)
  assert.equal(await job.cancel(), 'none')
  assert.equal((await client.job(unique()).state()).state, 'none')
  await assert.rejects(client.job(unique()).result(), { code: 'NO_RESULT' })
  const plain = await client.publish(q, 'x')
  assert.equal((await consumer.receive()).wantsResult, false)
  assert.equal(await client.job(plain).result({ timeoutMs: 100 }).catch((error) => error.code), 'NO_RESULT')
})

test('a handler returns results, fails, and is cancelled', async () => {
  const client = await connect(URL_)
  const q = unique()
  await client.setQueue(q, { retries: 1 })
  const consumer = await client.consume(q, [q], { cancellable: true, prefetch: 2 })
  const seen = []
  const handling = consumer.handle(async (message, { signal }) => {
    const { what } = message.json()
    seen.push(what)
    await message.progress(10, what)
    if (what === 'fail') throw new TypeError(`no ${'é'.repeat(400)}`)
    if (what === 'large') return 'x'.repeat(2_000_000)
    if (what === 'odd') return new Map()
    if (what === 'wait') await new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason)))
    if (what === 'finish') await new Promise((resolve) => signal.addEventListener('abort', resolve))
    if (what === 'settle') await message.ack({ result: 'its own', confirm: true })
    return { what, reason: signal.reason?.reason }
  }, { concurrency: 2 })
  const submit = (what) => client.submit(q, { what })
  assert.deepEqual(await (await submit('work')).result(), { what: 'work' })
  assert.equal(await (await submit('settle')).result(), 'its own')
  await assert.rejects((await submit('fail')).result(), { code: 'NO_RESULT', message: /dead: rejects TypeError: no é+$/ })
  await assert.rejects((await submit('odd')).result(), { code: 'NO_RESULT', message: /cannot be written as JSON/ })
  await assert.rejects((await submit('large')).result(), { code: 'NO_RESULT' })
  const waits = await submit('wait')
  await until(async () => (await waits.progress()) === 10)
  assert.equal(await waits.cancel({ reason: 'too late, 100 %' }), 'told')
  await assert.rejects(waits.result(), { code: 'NO_RESULT', reason: 'too late, 100 %' })
  const finishes = await submit('finish')
  await until(async () => (await finishes.progress()) === 10)
  assert.equal(await client.cancelJob(q, finishes.id), 'told')
  assert.deepEqual(await finishes.result(), { what: 'finish' })
  // Both are busy: what waits behind them is removed.
  const busy = [await submit('wait'), await submit('wait')]
  for (const each of busy) await until(async () => (await each.progress()) === 10)
  const behind = await submit('behind')
  assert.equal(await behind.cancel({ reason: 'no' }), 'cancelled')
  await assert.rejects(behind.result(), { code: 'NO_RESULT', reason: 'no' })
  for (const each of busy) await each.cancel()
  for (const each of busy) await assert.rejects(each.result(), { code: 'NO_RESULT' })
  assert.equal(consumer.held.size, 0)
  await consumer.close()
  await handling
  assert.ok(!seen.includes('behind'))
  await assert.rejects(consumer.handle('x'), { code: 'INVALID' })
  await assert.rejects(consumer.handle(() => {}, { concurrency: 0 }), { code: 'INVALID' })
  await assert.rejects(client.consume(q, { autoAck: true, cancellable: true }), { code: 'INVALID' })
  await client.deleteQueue(q)
})

test('what is cancelled before its turn is not handled', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q], { cancellable: true, prefetch: 2 })
  const seen = []
  const handling = consumer.handle(async (message, { signal }) => {
    seen.push(message.text)
    await new Promise((resolve) => signal.addEventListener('abort', resolve))
  })
  const [first, second] = [await client.submit(q, 'first'), await client.submit(q, 'second')]
  await until(async () => seen.length === 1)
  for (const each of [second, first]) {
    await until(async () => (await each.state()).state === 'running')
    assert.equal(await each.cancel(), 'told')
  }
  for (const each of [first, second]) await assert.rejects(each.result(), { code: 'NO_RESULT', message: /cancelled/ })
  assert.deepEqual(seen, ['first'])
  await consumer.close()
  await handling
})

test('a cancel comes before its turn, and ends with its connection', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url, QUICK)
  const q = unique()
  const consumer = await client.consume(q, [q], { cancellable: true, prefetch: 2 })
  const job = await client.submit(q, 'x')
  await until(async () => (await job.state()).state === 'running')
  assert.equal(await job.cancel({ reason: 'r' }), 'told')
  const message = await consumer.receive()
  assert.deepEqual([message.cancelReason, message.signal.aborted, message.signal.reason.code], ['r', true, 'CANCELLED'])
  proxy.cut()
  const again = await consumer.receive()
  assert.deepEqual([again.id, again.cancelReason, again.signal.aborted], [job.id, undefined, false])
  assert.equal(await message.ack({ result: 1 }), false)
  assert.equal(await again.ack({ confirm: true }), true)
  assert.equal(await job.result(), undefined)
})

test('what follows a batch is published when it has ended', async () => {
  const client = await connect(URL_)
  const [q, after, failed] = [unique(), unique(), unique()]
  for (const each of [q, after, failed]) await client.subscribe(each, [each])
  const batch = await client.openBatch(unique(), { then: [after, { a: 'b\n' }, { meta: { x: 'y' } }], onDead: [failed, 'f'], for: 60 })
  for (let each = 0; each < 2; each++) await batch.publish(q, each)
  const { total, waiting, closed, then, on_dead } = await batch.counts()
  assert.deepEqual([total, waiting, closed, then, on_dead], [2, 2, false, after, failed])
  assert.ok((await client.batches()).some(({ name }) => name === batch.name))
  assert.equal(await batch.close(), true)
  await assert.rejects(batch.wait({ timeoutMs: 60 }), { code: 'TIMEOUT' })
  const ends = client.batch(batch.name).wait()
  const consumer = await client.consume(q)
  for (let each = 0; each < 2; each++) await (await consumer.receive()).ack()
  await ends
  const end = await client.get(after)
  assert.deepEqual([end.id, end.json(), end.meta.x, end.meta['batch-total']], [`${batch.name}:end`, { a: 'b\n' }, 'y', '2'])
  assert.equal(await client.get(failed, { timeoutMs: 1 }), undefined)
  assert.deepEqual([await batch.counts(), await batch.close()], [undefined, false])
  await assert.rejects(batch.publish(q, 'x'), { code: 'REFUSED' })
  const other = await client.openBatch()
  assert.equal(await other.close({ discard: true }), true)
  await assert.rejects(client.openBatch('b', { then: 'x' }), { code: 'INVALID' })
  await assert.rejects(client.openBatch('b', { then: [q, 'x', { upTo: 1 }] }), { code: 'INVALID' })
  assert.equal(await client.batchCounts('b'), undefined)
})

test('once, mandatory, delay, at and ttl', async () => {
  const client = await connect(URL_)
  const q = unique()
  await assert.rejects(client.publish(q, 'x', { mandatory: true }), { code: 'REFUSED', errorId: /^[0-9a-f]{24}$/ })
  await client.subscribe(q, [q])
  await client.publish(q, 'x', { id: `${q}-1` })
  await client.publish(q, 'x', { id: `${q}-1` })
  await client.publish(q, 'twice', { id: `${q}-2`, once: false })
  await client.publish(q, 'twice', { id: `${q}-2`, once: false })
  await client.publish(q, 'later', { delay: 1000.5 })
  await client.publish(q, 'later', { at: new Date(Date.now() + 1e6), ttl: 5 })
  const facts = await client.stats('queue', q)
  assert.deepEqual([facts.ready, facts.scheduled], [3, 2])
  assert.equal((await client.peek(q, { scheduled: true })).length, 2)
  assert.equal((await client.peek(q, { soonest: true, limit: 1 })).length, 1)
  await client.renameQueue(q, `${q}-new`)
  assert.equal(await client.purge(`${q}-new`), 3)
  await client.renameQueue(`${q}-new`, q)
  await client.deleteQueue(q)
  await assert.rejects(client.consume(q, { existing: true }), { code: 'REFUSED' })
  await client.close()
})

test('prefetch holds back; reject, release, touch and get', async () => {
  const client = await connect(URL_)
  const q = unique()
  await client.setQueue(q, { retries: 3, deadLetters: `${q}.dead`, backoff: [0.001, 1] })
  await client.subscribe(q, [q])
  for (const each of [1, 2]) await client.publish(q, each)
  const consumer = await client.consume(q, { prefetch: 1 })
  const first = await consumer.receive()
  assert.equal(await consumer.receive({ timeoutMs: 50 }), undefined)
  assert.equal(await first.touch({ for: 60, confirm: true }), true)
  await first.release({ confirm: true })
  const again = await consumer.receive()
  assert.deepEqual([again.json(), again.retry], [1, 0])
  await again.reject({ dead: true, reason: 'no such thing', confirm: true })
  const second = await consumer.receive()
  assert.equal(second.json(), 2)
  await second.reject({ delay: 0 })
  assert.equal((await consumer.receive()).retry, 1)
  const dead = await client.get(`${q}.dead`)
  assert.deepEqual([dead.json(), dead.meta.why], [1, 'no such thing'])
  assert.equal(await client.get(`${q}.dead`, { timeoutMs: 20 }), undefined)
  await client.close()
})

test('an iterator that is left ends its consumer', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [], { masks: [`${q}.*`] })
  for (const each of [1, 2, 3]) await client.publish(`${q}.e`, each)
  for await (const message of consumer) {
    await message.ack()
    if (message.json() === 2) break
  }
  const facts = await client.stats('queue', q)
  assert.deepEqual([facts.ready, facts.unacked, facts.consumers], [1, 0, 0])
  await client.close()
})

test('20,000 messages at once, in order', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q], { prefetch: 1000 })
  const published = Promise.all(Array.from({ length: 20_000 }, (_, each) => client.publish(q, each)))
  let next = 0
  for await (const message of consumer) {
    assert.equal(message.json(), next++)
    message.ack()
    if (next === 20_000) break
  }
  await published
  await client.close()
})

test('what is not confirmed is sent again, and exists once', async () => {
  const proxy = await proxied()
  const direct = await connect(URL_)
  const client = await connect(proxy.url, QUICK)
  const q = unique()
  await direct.subscribe(q, [q])
  proxy.isDeaf = true
  const published = Promise.all(Array.from({ length: 100 }, (_, each) => client.publish(q, each)))
  await until(async () => (await direct.stats('queue', q)).ready === 100)
  proxy.isDeaf = false
  proxy.cut()
  await published
  assert.equal(proxy.seen.split(' publish ').length, 201)
  assert.deepEqual((await direct.peek(q, { limit: 1000 })).map((each) => each.json()), Array.from({ length: 100 }, (_, each) => each))
})

test('a consumer comes back with what it has not acked', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url, QUICK)
  const q = unique()
  const consumer = await client.consume(q, [q])
  await client.publish(q, 'x')
  const lost = await consumer.receive()
  await client.rebind(q, { add: ['other'] })
  proxy.cut()
  const message = await consumer.receive()
  assert.deepEqual([message.id, message.retry], [lost.id, 1])
  assert.equal(await lost.ack({ confirm: true }), false)
  assert.equal(await message.ack({ confirm: true }), true)
  assert.deepEqual((await client.stats('queue', q)).events.sort(), ['other', q].sort())
})

test('several servers, and none', async () => {
  const proxy = await proxied()
  proxy.close()
  const client = await connect(`${proxy.url},${URL_}`, QUICK)
  assert.equal(await client.request('ping', 'hello'), 'hello')
  await client.close()
  await assert.rejects(client.request('ping', 'x'), { code: 'CLOSED' })
  await assert.rejects(connect([proxy.url, proxy.url], { ...QUICK, connectAgain: false }), { code: 'CONNECTION' })
  const [port] = proxy.url.split(':').slice(-1)
  const dead = connected([proxy.url, `mqks://localhost:${port}`], { ...QUICK, connectTimeoutMs: 200 })
  const refused = `connect ECONNREFUSED 127\\.0\\.0\\.1:${port}`
  await assert.rejects(dead, { code: 'CONNECTION', message: RegExp(`^not connected within 0.2 s: 127.0.0.1:${port}: ${refused}; localhost:${port}: .*${refused}`) })
})

test('what can not be right is not sent', async () => {
  const client = await connect(URL_)
  const q = unique()
  const consumer = await client.consume(q, [q])
  await client.publish(q, 'x')
  const message = await consumer.receive()
  const wrong = {
    'is not a name': [client.publish('a b', 'x'), client.publish('', 'x'), client.publish('--x', 'x'), client.publish('e', 'x', { id: 'a\nb' }), client.consume('q\n')],
    'must be text': [client.publish(5, 'x'), client.publish('e', 'x', { to: new Map() }), client.publish('e', 'x', { key: 5 }), client.publish('e', 'x', { meta: { a: 5 } }), client.request(5)],
    'half of a surrogate pair': [client.publish('e', 'half \ud83d'), client.publish('\ude00', 'x'), client.publish('e', 'x', { key: '\ud83d' }), client.publish('e', 'x', { meta: { '\ud83d': 'x' } }), message.reject({ reason: '\ud83d' })],
    'cannot be written as JSON': [undefined, () => 1, NaN, Infinity, new Map([[1, 2]]), { a: [new Set([1])] }, Promise.resolve(1), /x/].map((each) => client.publish('e', each)),
    'must be a number': [client.publish('e', 'x', { delay: '5' }), client.publish('e', 'x', { at: new Date(NaN) }), client.publish('e', 'x', { ttl: Infinity }), client.consume('q', { prefetch: '5' }), message.reject({ delay: NaN }), message.touch({ for: '5' })],
    'a time limit is a number': [client.publish('e', 'x', { timeoutMs: NaN }), client.publish('e', 'x', { timeoutMs: -1 }), client.consume('q', { timeoutMs: '5' }), client.get('q', { timeoutMs: NaN }), consumer.receive({ timeoutMs: NaN })],
    'meta must be an object': [client.publish('e', 'x', { meta: new Map([['a', 'b']]) }), client.publish('e', 'x', { meta: null })],
    'a list of names is needed': [client.subscribe('q', 'e'), client.consume('q', { add: 'e' }), client.rebind('q', { events: 'e' })],
    'there is no option dealy': [
      ...[client.publish('e', 'x', { dealy: 5 }), client.consume('q', ['e'], { dealy: 5 }), client.get('q', { dealy: 5 }), client.peek('q', { dealy: 5 }), client.reason('x', { dealy: 5 })],
      ...[client.subscribe('q', ['e'], { dealy: 5 }), client.rebind('q', { dealy: 5 }), consumer.receive({ dealy: 5 })],
      ...[message.ack({ dealy: 5 }), message.reject({ dealy: 5 }), message.release({ dealy: 5 }), message.touch({ dealy: 5 }), connect(URL_, { dealy: 1 })],
    ],
    'lineBytesMax, 1048576': [client.publish('e', Buffer.alloc(1 << 20)), message.reject({ reason: 'x'.repeat(1 << 20) })],
    'there is nothing to change': [client.rebind('q', { add: [] })],
    'there is no policy': [client.setQueue('q', { 'a b': 1 })],
    'a tab or a newline': [client.request('ping a\nx ping')],
    'a URL starts with': [connect('http://x')],
    'this is not a URL': [connect('mqks://x:70000'), connect(5)],
    'a % in the credentials': [connect('mqks://%zz@x')],
    '"my worker"|\'my worker\'': [connect(URL_, { name: 'my worker' }), connect(`${URL_}?name=my%20worker`)],
    'must be a positive number': [0, -1, NaN, '5', null].map((each) => connect(URL_, { timeoutMs: each })),
    'must be a boolean': [connect(URL_, { connectAgain: 1 })],
    'the options of the connection are wrong': [connect('mqkss://127.0.0.1:1', { tls: { cert: 'no PEM' } }), connect(['mqks://127.0.0.1:1', 'mqkss://127.0.0.1:1'], { ...QUICK, tls: { cert: 'no PEM' } })],
  }
  const refuses = (told) => (promise) => assert.rejects(promise, (error) => {
    assert.match(error.message, RegExp(told))
    return error instanceof TypeError && error.code === 'INVALID'
  })
  await Promise.all(Object.entries(wrong).flatMap(([told, each]) => each.map(refuses(told))))
  assert.equal(await message.ack({ confirm: true }), true)
  await client.publish('a--b', '\ud83d\ude00')
  assert.deepEqual(await client.stats('queues', '--limit=1', '--after=\u{10ffff}'), [])
  await client.close()
})

test('a refusal has its reason', async () => {
  const client = await connect(URL_)
  const q = unique()
  const reason = `publish: no queue is bound to '${q}'`
  const error = await client.publish(q, 'x', { mandatory: true }).catch((each) => each)
  assert.deepEqual([error.code, error.reason, error.message], ['REFUSED', reason, `the server refused the request, error ${error.errorId}: ${reason}`])
  assert.equal(await client.reason(error.errorId), reason)
  assert.equal(await client.reason('0'.repeat(24)), undefined)
  await assert.rejects(client.consume(q, { existing: true }), { code: 'REFUSED', reason: RegExp(`there is no queue '${q}'`) })
})

test('attributes that come twice', async () => {
  const { url } = await peer(([id, action]) => {
    if (action === 'ping') return `${id} ok`
    return action === 'consume' && [`${id} ok `, `${id} ok m event=e,retry=0,meta=a=1&a=2 x`]
  })
  const client = await connect(url, QUICK)
  assert.deepEqual((await (await client.consume('q')).receive()).meta, { a: '2' })
})

test('a late reply is a timeout', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url)
  proxy.isDeaf = true
  await assert.rejects(client.publish('e', 'x', { timeoutMs: 20 }), { code: 'TIMEOUT' })
  proxy.isDeaf = false
})

test('long time limits and none are no short ones', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url, { ...QUICK, timeoutMs: Infinity, connectTimeoutMs: 2 ** 31, keepAliveMs: 2 ** 40 })
  const q = unique()
  const consumer = await client.consume(q, [q], { timeoutMs: 2 ** 31 })
  proxy.isDeaf = true
  const waiting = [consumer.receive({ timeoutMs: 2 ** 31 }), consumer.receive({ timeoutMs: Infinity }), client.publish('e', 'x', { timeoutMs: 2 ** 40 }), client.publish('e', 'x')]
  assert.equal(await Promise.race([...waiting, new Promise((resolve) => setTimeout(resolve, 50, 'still'))]), 'still')
  proxy.isDeaf = false
  proxy.cut()
  await Promise.all(waiting.slice(2))
})

test('what waits goes in its order, and has a limit', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url, { ...QUICK, inFlightMax: 2, waitingMax: 500, waitingBytesMax: 100_000 })
  const q = unique()
  await client.subscribe(q, [q])
  let looked = 0
  const { hasRoom } = client.connection
  client.connection.hasRoom = (call) => (looked++, hasRoom.call(client.connection, call))
  proxy.isDeaf = true
  const published = Array.from({ length: 502 }, (_, each) => client.publish(q, each, { confirm: each < 3 || each % 3 > 0 }))
  await assert.rejects(client.publish(q, 'x'), { code: 'UNSENT', message: /500 requests with \d+ bytes wait already/ })
  proxy.isDeaf = false
  proxy.cut()
  await Promise.all(published)
  // A message that is confirmed makes room for one, and all the others do not look.
  assert.ok(looked < 4 * 502, `${looked}`)
  const told = await client.peek(q, { limit: 1000 })
  assert.deepEqual(told.map((each) => each.json()), Array.from({ length: 502 }, (_, each) => each))
  const { waiting, waitingBytes, inFlightBytes } = client.connection
  assert.deepEqual([waiting.size, waitingBytes, inFlightBytes], [0, 0, 0])
  proxy.isDeaf = true
  const large = [100, 100, 50, 50].map((timeoutMs) => client.publish(q, 'x'.repeat(60_000), { timeoutMs }))
  await Promise.all([
    ...[0, 1].map((each) => assert.rejects(large[each], { code: 'TIMEOUT' })),
    assert.rejects(large[2], { code: 'UNSENT', message: 'no room to send the request in time (connected)' }),
    assert.rejects(large[3], { code: 'UNSENT', message: /1 requests with 6\d{4} bytes wait already/ }),
  ])
  proxy.isDeaf = false
})

test('what is not read is not silent', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url, { ...QUICK, keepAliveMs: 50, bufferBytesMax: 1000 })
  const q = unique()
  const consumer = await client.consume(q, [q], { autoAck: true })
  const { accepted } = proxy
  await Promise.all(Array.from({ length: 80 }, (_, each) => client.publish(q, `${each}${' '.repeat(50_000)}`)))
  for (let each = 0; each < 80; each++) {
    assert.equal((await consumer.receive()).json(), each)
    await new Promise((resolve) => setTimeout(resolve, 5))
  }
  assert.equal(proxy.accepted, accepted)
})

test('a confirm behind messages that are not read comes', async () => {
  const client = await connect(URL_, { bufferBytesMax: 1000 })
  const q = unique()
  const consumer = await client.consume(q, [q], { prefetch: 0 })
  await Promise.all(Array.from({ length: 50 }, (_, each) => client.publish(q, `${each}${' '.repeat(50_000)}`)))
  for (let each = 0; each < 50; each++) {
    const message = await consumer.receive()
    assert.equal(message.json(), each)
    assert.equal(await message.ack({ confirm: true }), true)
  }
})

test('half a request is never completed', async () => {
  const heads = []
  let isFirst = true
  const server = net.createServer((socket) => {
    let seen = ''
    socket.on('error', () => {}).on('data', (data) => {
      const before = seen.length
      seen += data.toString('latin1')
      if (!before) socket.write(`${seen.split(' ')[0]} ok \n`)
      else if (isFirst) {
        isFirst = false
        heads.push(seen.slice(0, 1000))
        socket.resetAndDestroy()
      } else if (seen.endsWith('\n')) {
        heads.push(seen)
        for (const each of seen.trim().split('\n')) if (each.includes(' publish ')) socket.write(`${each.split(' ')[0]} ok \n`)
      }
    })
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  ended.push({ close: () => server.close() })
  const client = await connect(`mqks://127.0.0.1:${server.address().port}`, { ...QUICK, closeTimeoutMs: 10 })
  const data = 'x'.repeat(1_000_000)
  await client.publish('e', data, { id: 'm' })
  assert.match(heads[0], / ping hello\nm publish --confirm --once e x+$/)
  assert.match(heads[1], /^\S+ ping hello\nm publish --confirm --once e x{1000000}\n/)
})

test('a client that is closed', async () => {
  const client = await connect(URL_)
  const q = unique()
  for (let each = 0; each < 3; each++) await (await client.consume(q, [q])).close()
  assert.equal(await client.get(q, { timeoutMs: 1 }), undefined)
  assert.equal(client.consumers.size, 0)
  const consumer = await client.consume(q, [q])
  const received = consumer.receive({ timeoutMs: 1e9 })
  await Promise.all([client.close(), client.close(), assert.rejects(client.consume(q), { code: 'CLOSED' })])
  assert.equal(await received, undefined)
  assert.equal(await consumer.receive(), undefined)
  await assert.rejects(client.consume(q), { code: 'CLOSED' })
  await assert.rejects(client.get(q), { code: 'CLOSED' })
  assert.equal(client.consumers.size, 0)
})

test('a process ends by itself', async () => {
  const program = (url) => `
    const { connect } = require(${JSON.stringify(require.resolve('./mqks.js'))})
    connect('${url}', { connectTimeoutMs: 100 }).then(async (client) => {
      const consumer = await client.consume('ends', ['ends'])
      consumer.receive({ timeoutMs: 1e9 })
      await client.publish('ends', 'x')
      await client.close()
      await client.consume('ends').catch((error) => console.log(error.code))
    }).catch((error) => console.log(error.code))`
  const ends = async (url) => (await promisify(execFile)(process.execPath, ['-e', program(url)])).stdout
  const silent = await peer(() => undefined)
  const told = await Promise.all([URL_, silent.url, 'mqks://127.0.0.1:1'].map(ends))
  assert.deepEqual(told, ['CLOSED\n', 'CONNECTION\n', 'CONNECTION\n'])
})

test('TLS', async () => {
  const options = { ...QUICK, connectAgain: false, tls: { ca: fs.readFileSync(process.env.MQKS_CA) } }
  const client = await connect(process.env.MQKS_TLS_URL, options)
  assert.equal(await client.request('ping', 'hello'), 'hello')
  await client.close()
  await assert.rejects(connect(process.env.MQKS_TLS_URL, { connectAgain: false }), { code: 'CONNECTION' })
}, { skip: !process.env.MQKS_TLS_URL })

test('credentials', async () => {
  const client = await connect(process.env.MQKS_USER_URL)
  await client.publish('mine', 'x')
  await assert.rejects(client.publish('other', 'x'), { code: 'REFUSED' })
  await client.close()
  const wrong = process.env.MQKS_USER_URL.replace('secret@', 'wrong@')
  await assert.rejects(connect(wrong), { code: 'AUTH', message: /^the server refused the credentials, error [0-9a-f]{24}$/ })
  const without = await connect(process.env.MQKS_USER_URL.replace('secret@', ''))
  const reason = 'it requires credentials, as in mqks://USER:PASSWORD@HOST or mqks://TOKEN@HOST'
  await assert.rejects(without.publish('mine', 'x'), { code: 'AUTH', reason })
  await assert.rejects(without.consume('mine'), { code: 'AUTH', reason })
}, { skip: !process.env.MQKS_USER_URL })
