'use strict'
// Against a real broker: MQKS_URL, and MQKS_TLS_URL with MQKS_CA, and MQKS_USER_URL.
const assert = require('node:assert/strict')
const fs = require('node:fs')
const net = require('node:net')
const node = require('node:test')
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
  for (const each of ended.splice(0).reverse()) await each.close()
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

test('a reply that is neither ok nor an error ends the client', async () => {
  const server = net.createServer((socket) => {
    socket.on('error', () => {}).on('data', (data) => {
      const ids = data.toString().trim().split('\n').map((each) => each.split(' '))
      for (const [id, action] of ids) socket.write(`${id} ${action === 'ping' ? 'ok hello' : 'what'}\n`)
    })
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  ended.push({ close: () => server.close() })
  const client = await connect(`mqks://127.0.0.1:${server.address().port}`, QUICK)
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
  assert.equal(await client.purge(q), 3)
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
})

test('what can not be right is not sent', async () => {
  const client = await connect(URL_)
  const wrong = [client.publish('a b', 'x'), client.publish('', 'x'), client.publish('--x', 'x'), client.publish('e', undefined)]
  wrong.push(client.publish('e', 'x', { delay: '5' }), client.publish('e', 'x', { id: 'a\nb' }), client.publish('e', Buffer.alloc(1 << 20)))
  wrong.push(client.request('ping a\nx ping'), client.setQueue('q', { 'a b': 1 }), client.consume('q\n'))
  wrong.push(client.publish('e', 'half \ud83d'), client.publish('\ude00', 'x'), client.rebind('q', { add: [] }))
  for (const each of wrong) await assert.rejects(each, { code: 'INVALID' })
  await assert.rejects(connect('http://x'), { code: 'INVALID' })
  await assert.rejects(connect(URL_, { timeout: 1 }), { code: 'INVALID' })
  await client.publish('a--b', '\ud83d\ude00')
  assert.deepEqual(await client.stats('queues', '--limit=1', '--after=\u{10ffff}'), [])
  await client.close()
})

test('a late reply is a timeout', async () => {
  const proxy = await proxied()
  const client = await connect(proxy.url)
  proxy.isDeaf = true
  await assert.rejects(client.publish('e', 'x', { timeoutMs: 20 }), { code: 'TIMEOUT' })
  proxy.isDeaf = false
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
  await assert.rejects(connect(wrong), { code: 'AUTH' })
}, { skip: !process.env.MQKS_USER_URL })
