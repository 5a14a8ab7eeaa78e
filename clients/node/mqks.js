'use strict'
// The client of MQKS for Node.js: the line protocol of docs/protocol.md, in one file.
//
// A connection lives many times: after each loss it comes back, and sends again what has no answer,
// under the old ids. A consumer has a connection of its own, so that a slow one delays no publish.

const crypto = require('node:crypto')
const net = require('node:net')
const tls = require('node:tls')

const PORT = 25000
const MIB = 1 << 20
const DEFAULTS = {
  timeoutMs: 30_000,
  connectTimeoutMs: 10_000,
  connectAgain: true,
  keepAliveMs: 15_000,
  reconnectMinMs: 50,
  reconnectMaxMs: 1000,
  inFlightMax: 10_000,
  inFlightBytesMax: 16 * MIB,
  lineBytesMax: MIB,
  replyBytesMax: 64 * MIB,
  name: '',
  tls: undefined,
}
const META = /^(.*),retry=(\d+)(?:,escaped=1)?(?:,priority=(-?\d+))?(?:,key=([^,]*))?,meta=(.*)$/s

/** What fails here; `code` is one of those in mqks.d.ts, `errorId` the one in the server's log. */
class MqksError extends Error {
  constructor(code, message, errorId) {
    super(message)
    this.name = 'MqksError'
    this.code = code
    this.errorId = errorId
  }
}

const invalid = (why) => new MqksError('INVALID', why)

// -- bytes

function bytes(text) {
  if (typeof text !== 'string') return Buffer.from(text.buffer, text.byteOffset, text.byteLength)
  if (/\p{Surrogate}/u.test(text)) throw invalid('half of a surrogate pair is no character')
  return Buffer.from(text)
}

/** A name that is valid as a word of a request. */
function name(text) {
  if (typeof text !== 'string' && !(text instanceof Uint8Array)) throw invalid(`${text} is not a name`)
  const word = bytes(text)
  if (!word.length || word.includes(32) || word.includes(9) || word.includes(10) || (word[0] === 45 && word[1] === 45)) {
    throw invalid(`${JSON.stringify(String(text)).slice(0, 80)} is not a name: it is empty, starts with "--", or has a space, tab or newline`)
  }
  return word
}

function number(value, what) {
  if (typeof value !== 'number' || !Number.isFinite(value)) throw invalid(`${what} must be a number, not ${value}`)
  // No exponent: the server takes decimals, exact to a microsecond.
  return value.toFixed(6).replace(/\.?0+$/, '')
}

const SHORT = { 92: '\\\\', 10: '\\n', 13: '\\r', 9: '\\t' }
const LONG = { 92: 92, 110: 10, 114: 13, 116: 9 }

function escape(raw) {
  return Buffer.from(raw.toString('latin1').replace(/[\\\n\r\t]/g, (each) => SHORT[each.charCodeAt(0)]), 'latin1')
}

function unescape(raw) {
  if (!raw.includes(92)) return raw
  const whole = Buffer.allocUnsafe(raw.length)
  let size = 0
  for (let at = 0; at < raw.length; at++) whole[size++] = raw[at] === 92 ? LONG[raw[++at]] : raw[at]
  return whole.subarray(0, size)
}

/** The data of a message as they are sent, and whether they are escaped. */
function published(data) {
  let raw
  if (typeof data === 'string' || data instanceof Uint8Array) raw = bytes(data)
  else {
    const text = JSON.stringify(data)
    if (text === undefined) throw invalid('these data cannot be written as JSON')
    raw = Buffer.from(text)
  }
  const fits = !raw.includes(10) && !raw.includes(9) && raw[raw.length - 1] !== 13
  return fits ? [raw, false] : [escape(raw), true]
}

const percent = (text) =>
  encodeURIComponent(text).replace(/[!'()*]/g, (each) => '%' + each.charCodeAt(0).toString(16).toUpperCase())

function unpercent(text) {
  if (!text.includes('%')) return text
  const raw = Buffer.from(text, 'latin1').toString('latin1').replace(/%([0-9a-fA-F]{2})/g, (_, hex) => String.fromCharCode(parseInt(hex, 16)))
  return Buffer.from(raw, 'latin1').toString()
}

function metaOf(text) {
  const meta = {}
  for (const pair of text ? text.split('&') : []) {
    const at = pair.indexOf('=')
    Object.defineProperty(meta, unpercent(pair.slice(0, at)), { value: unpercent(pair.slice(at + 1)), enumerable: true })
  }
  return meta
}

const metaText = (meta) => Object.entries(meta).map(([key, value]) => `${percent(key)}=${percent(String(value))}`).join('&')

/** A request of these words. Of two carriage returns at its end, the first is data. */
function line(...words) {
  const parts = []
  for (const word of words) parts.push(parts.length ? ' ' : '', word)
  const joined = Buffer.concat(parts.map((part) => (typeof part === 'string' ? Buffer.from(part) : part)))
  return Buffer.concat([joined, Buffer.from(joined[joined.length - 1] === 13 ? '\r\n' : '\n')])
}

/** Bytes in, lines out. */
class Lines {
  constructor(bytesMax) {
    this.bytesMax = bytesMax
    this.parts = []
    this.size = 0
  }

  feed(chunk) {
    const lines = []
    let start = 0
    for (let end; (end = chunk.indexOf(10, start)) >= 0; start = end + 1) {
      this.parts.push(chunk.subarray(start, end))
      lines.push(this.parts.length === 1 ? this.parts[0] : Buffer.concat(this.parts))
      this.parts = []
      this.size = 0
    }
    if (start < chunk.length) {
      this.parts.push(chunk.subarray(start))
      this.size += chunk.length - start
      if (this.size > this.bytesMax) throw new MqksError('PROTOCOL', 'the server sent a line longer than replyBytesMax')
    }
    return lines
  }
}

// -- addresses

function servers(urls) {
  const list = Array.isArray(urls) ? urls : String(urls).split(/,\s*(?=mqks(?:s|\+unix)?:\/\/)/)
  return list.map((text) => {
    let url
    try {
      url = new URL(text)
    } catch {
      throw invalid('this is not a URL of a server, such as mqks://127.0.0.1:25000')
    }
    const kind = url.protocol
    if (!['mqks:', 'mqkss:', 'mqks+unix:'].includes(kind)) throw invalid(`a URL starts with mqks://, mqkss:// or mqks+unix://, not ${kind}//`)
    const words = [url.username, url.password].filter(Boolean).map(decodeURIComponent)
    if (words.some((word) => /[\s]/.test(word))) throw invalid('credentials must not contain white space')
    return {
      host: url.hostname.replace(/^\[|\]$/g, '') || '127.0.0.1',
      port: Number(url.port) || PORT,
      path: kind === 'mqks+unix:' ? decodeURIComponent(url.pathname) : '',
      isTls: kind === 'mqkss:',
      credentials: words,
      name: url.searchParams.get('name') || '',
    }
  })
}

// -- one connection over all its lives

class Connection {
  constructor(addresses, options) {
    this.addresses = addresses
    this.options = options
    this.prefix = crypto.randomBytes(8).toString('hex')
    this.count = 0
    this.next = 0
    this.failures = 0
    this.tried = 0
    this.inFlight = new Map()
    this.inFlightBytes = 0
    this.room = []
    this.isUp = this.wasUp = false
    this.failure = null
    this.socket = null
    this.reason = 'no answer yet'
    this.onUp = () => {}
    this.onReply = () => false
    this.onFail = () => {}
    this.ready = new Promise((resolve, reject) => Object.assign(this, { isReady: resolve, isNotReady: reject }))
    this.ready.catch(() => {})
    this.open()
  }

  newId() {
    return `${this.prefix}-${++this.count}`
  }

  open() {
    const server = this.addresses[this.next++ % this.addresses.length]
    const where = server.path ? { path: server.path } : { host: server.host, port: server.port }
    const socket = server.isTls
      ? tls.connect({ ...where, servername: net.isIP(server.host) ? '' : server.host, ...this.options.tls })
      : net.connect(where)
    const lines = new Lines(this.options.replyBytesMax)
    const greeting = this.newId()
    this.socket = socket
    socket.setNoDelay(true)
    let why = 'the server closed the connection'
    const late = setTimeout(() => socket.destroy(new Error('no answer in time')), this.options.connectTimeoutMs)
    socket.once(server.isTls ? 'secureConnect' : 'connect', () => {
      const words = server.credentials
      socket.write(line(greeting, words.length ? `auth --confirm ${words.join(' ')}` : 'ping hello'))
      const called = server.name || this.options.name
      if (called) socket.write(line(this.newId(), 'set_name', name(called)))
    })
    const heard = () => {
      clearTimeout(this.alive)
      this.alive = setTimeout(() => {
        socket.write(line(this.newId(), 'ping alive'))
        this.alive = setTimeout(() => socket.destroy(new Error('no answer to a ping')), this.options.keepAliveMs)
      }, this.options.keepAliveMs)
    }
    socket.on('data', (chunk) => {
      if (socket !== this.socket) return
      if (this.isUp) heard()
      try {
        for (const each of lines.feed(chunk)) {
          if (!this.isUp && each.toString('latin1').startsWith(`${greeting} `)) {
            clearTimeout(late)
            if (each.toString('latin1').startsWith(`${greeting} error`)) {
              return this.fail(new MqksError('AUTH', 'the server refused the credentials, or needs some', each.toString().split(' ')[2]))
            }
            heard()
            this.up()
          } else if (each.toString('latin1', 0, 8) === '- error ') why = each.toString().slice(8)
          else if (!this.isUp || !each.includes(32)) throw new MqksError('PROTOCOL', 'the peer is not an MQKS server')
          else if (!this.onReply(each)) this.reply(each)
        }
      } catch (error) {
        if (!(error instanceof MqksError)) throw error
        this.fail(error)
      }
    })
    socket.on('drain', () => this.giveRoom())
    socket.on('error', (error) => (why = error.message || error.code))
    socket.on('close', () => {
      clearTimeout(late)
      if (socket !== this.socket) return
      clearTimeout(this.alive)
      this.socket = null
      this.isUp = false
      this.reason = why
      if (!this.failure) this.lost()
    })
  }

  up() {
    this.isUp = this.wasUp = true
    this.failures = this.tried = 0
    this.onUp()
    for (const each of this.inFlight.values()) {
      each.lines = []
      this.socket.write(each.line)
    }
    this.isReady()
  }

  lost() {
    if (!this.wasUp && !this.options.connectAgain && ++this.tried >= this.addresses.length) {
      return this.fail(new MqksError('CONNECTION', this.reason))
    }
    const wait = Math.min(this.options.reconnectMaxMs, this.options.reconnectMinMs * 2 ** Math.min(this.failures++, 20))
    this.timer = setTimeout(() => this.open(), wait * (0.5 + 0.5 * Math.random()))
  }

  /** Ends it for good. */
  fail(failure) {
    if (this.failure) return
    this.failure = failure
    this.isUp = false
    clearTimeout(this.timer)
    clearTimeout(this.alive)
    const { socket } = this
    if (socket) {
      socket.end()
      setTimeout(() => socket.destroy(), 2000).unref()
    }
    for (const [id] of this.inFlight) this.settle(id, (call) => call.reject(failure))
    this.isNotReady(failure)
    this.giveRoom()
    this.onFail(failure)
  }

  reply(each) {
    const text = each.toString('latin1')
    const at = text.indexOf(' ')
    const id = text.slice(0, at)
    const call = this.inFlight.get(id)
    if (!call) return
    const rest = text.slice(at + 1)
    if (rest.startsWith('error ')) {
      const errorId = rest.slice(6)
      this.settle(id, () => call.reject(new MqksError('REFUSED', `the server refused the request, error ${errorId}`, errorId)))
    } else if (!rest.startsWith('ok ')) throw new MqksError('PROTOCOL', `a reply is neither ok nor an error: ${rest.slice(0, 100)}`)
    else {
      const answer = each.subarray(at + 4)
      if (call.isMany && !/^--end( |$)/.test(answer.toString('latin1', 0, 6))) call.lines.push(answer)
      else this.settle(id, () => call.resolve(call.isMany ? call.lines : answer))
    }
  }

  settle(id, how) {
    const call = this.inFlight.get(id)
    if (!call) return
    this.inFlight.delete(id)
    this.inFlightBytes -= call.line.length
    clearTimeout(call.timer)
    how(call)
    if (this.hasRoom) this.giveRoom()
  }

  giveRoom() {
    const waiting = this.room
    this.room = []
    for (const go of waiting) go()
  }

  get hasRoom() {
    const { inFlightMax, inFlightBytesMax } = this.options
    return this.inFlight.size < inFlightMax && this.inFlightBytes < inFlightBytesMax
  }

  get isFull() {
    return this.isUp && this.socket.writableNeedDrain && this.socket.writableLength > MIB
  }

  check(request) {
    if (request.length > this.options.lineBytesMax + 1) {
      throw invalid(`a request of ${request.length - 1} bytes is longer than lineBytesMax, ${this.options.lineBytesMax}`)
    }
  }

  /** Sends this with what else is written in this turn. */
  write(request) {
    const { socket } = this
    if (!socket.writableCorked) {
      socket.cork()
      process.nextTick(() => socket.uncork())
    }
    socket.write(request)
  }

  /** Sends a request that is answered, now or in a later life. */
  async ask(id, request, { isMany = false, timeoutMs = this.options.timeoutMs } = {}) {
    this.check(request)
    const key = bytes(id).toString('latin1')
    const endMs = Date.now() + timeoutMs
    const late = () => new MqksError('TIMEOUT', `no reply in time (${this.isUp ? 'connected' : this.reason}); whether the request was executed is unknown`)
    while (!this.failure && !this.hasRoom) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, Math.max(1, endMs - Date.now()))
        this.room.push(() => (clearTimeout(timer), resolve()))
      })
      if (Date.now() >= endMs) throw late()
    }
    if (this.failure) throw this.failure
    if (this.inFlight.has(key)) throw invalid('a request with this id is already in flight')
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => this.settle(key, () => reject(late())), Math.max(1, endMs - Date.now()))
      this.inFlight.set(key, { line: request, resolve, reject, isMany, lines: [], timer })
      this.inFlightBytes += request.length
      if (this.isUp) this.write(request)
    })
  }

  /** Sends what nobody waits for; whether it was sent. */
  tell(request) {
    this.check(request)
    if (this.failure) throw this.failure
    if (this.isUp) this.write(request)
    return this.isUp
  }
}

// -- what programs use

/** One message that was delivered, or peeked at. */
class Message {
  constructor(consumer, life, rawId, traits, data) {
    const escaped = traits.includes(',escaped=1')
    const [, event, retry, priority, key, meta] = META.exec(traits) || [null, traits, '0', undefined, undefined, '']
    this.consumer = consumer
    this.life = life
    this.rawId = rawId
    this.id = rawId.toString()
    this.event = Buffer.from(event, 'latin1').toString()
    this.retry = Number(retry)
    this.priority = Number(priority || 0)
    this.key = key === undefined ? undefined : unpercent(key)
    this.meta = metaOf(meta)
    this.data = escaped ? unescape(data) : data
    this.isSettled = !consumer
  }

  get text() {
    return this.data.toString()
  }

  json() {
    return JSON.parse(this.text)
  }

  /** Processed: it is removed. */
  ack(options) {
    return this.settle('ack', [], options)
  }

  /** Back to the tail of its queue; `dead` makes it a dead letter at once. */
  reject({ dead = false, delay, reason, ...options } = {}) {
    const flags = []
    if (dead) flags.push('--dead')
    if (delay !== undefined) flags.push(`--delay=${number(delay, 'delay')}`)
    if (reason !== undefined) flags.push(`--reason=${percent(reason)}`)
    return this.settle('reject', flags, options)
  }

  /** Back to its old place, as if it had not been delivered. */
  release({ delay, ...options } = {}) {
    return this.settle('release', delay === undefined ? [] : [`--delay=${number(delay, 'delay')}`], options)
  }

  /** More time before the ack timeout. */
  touch({ for: seconds, ...options } = {}) {
    return this.send('touch', seconds === undefined ? [] : [`--for=${number(seconds, 'for')}`], options)
  }

  settle(verb, flags, options) {
    if (this.isSettled) return Promise.resolve(false)
    this.isSettled = true
    return this.send(verb, flags, options)
  }

  /** Whether the server was told; after a reconnect the message is no longer this consumer's. */
  async send(verb, flags, { confirm = false } = {}) {
    const { connection, id, life } = this.consumer || {}
    if (!this.consumer || life !== this.life || !connection.isUp || this.consumer.options.autoAck) return false
    const words = [id, this.rawId, ...flags]
    if (!confirm) return connection.tell(line('a', verb, ...words))
    const request = connection.newId()
    try {
      await connection.ask(request, line(request, verb, '--confirm', ...words))
    } catch (error) {
      if (error.code === 'LOST') return false
      throw error
    }
    return true
  }
}

function delivery(each, consumer, life) {
  const first = each.indexOf(32)
  const second = each.indexOf(32, first + 4)
  const third = each.indexOf(32, second + 1)
  const traits = each.toString('latin1', second + 7, third)
  return new Message(consumer, life, each.subarray(first + 4, second), traits, each.subarray(third + 1))
}

/** Messages of a queue: an async iterator. */
class Consumer {
  constructor(addresses, options, queue, events, given) {
    this.options = given
    this.life = 0
    this.messages = []
    this.takers = []
    this.failure = null
    this.words = [name(queue), ...events.map(name)]
    if (given.add?.length) this.words.push('--add', ...given.add.map(name))
    if (given.masks?.length) this.words.push('--add-mask', ...given.masks.map(name))
    const rule = given.deleteWhenUnused
    if (rule !== undefined && rule !== false) this.words.push(rule === true ? '--delete-queue-when-unused' : `--delete-queue-when-unused=${number(rule, 'deleteWhenUnused')}`)
    this.prefetch = given.prefetch ?? 100
    if (!given.autoAck) {
      this.words.push('--manual-ack')
      if (this.prefetch) this.words.push(`--prefetch=${number(this.prefetch, 'prefetch')}`)
      if (given.ackTimeout !== undefined) this.words.push(`--ack-timeout=${number(given.ackTimeout, 'ackTimeout')}`)
      if (given.backoff !== undefined) this.words.push(`--backoff=${[given.backoff].flat().map((each) => number(each, 'backoff'))}`)
    }
    this.words.push('--meta')
    if (given.existing) this.words.push('--existing')
    if (given.keep ?? !(events.length || given.add?.length || given.masks?.length)) this.words.push('--keep')
    this.isConsuming = false
    this.started = new Promise((resolve, reject) => Object.assign(this, { isStarted: resolve, isNotStarted: reject }))
    this.started.catch(() => {})
    const connection = (this.connection = new Connection(addresses, options))
    connection.check(line('x'.repeat(60), 'consume --confirm', ...this.words))
    connection.onUp = () => this.begin()
    connection.onReply = (each) => this.take(each)
    connection.onFail = (failure) => this.end(failure)
  }

  begin() {
    // What was delivered in an earlier life goes back by itself, and its confirms never come.
    const lost = new MqksError('LOST', 'the connection was lost before the confirm')
    for (const [id] of this.connection.inFlight) this.connection.settle(id, (call) => call.reject(lost))
    if (!this.options.autoAck) this.messages = []
    const earlier = this.id
    this.id = this.connection.newId()
    this.mine = `${this.id} ok `
    this.life++
    let words = this.words
    if (this.isConsuming) {
      words = this.told || words
      const [queue, ...rest] = words
      const isEvent = rest.length && !rest[0].toString('latin1').startsWith('--')
      words = [queue, ...(isEvent ? ['--add'] : []), ...rest]
      if (this.options.existing && !words.includes('--existing')) words.push('--existing')
      if (!words.includes('--keep')) words.push('--keep')
    }
    this.connection.socket.write(line(this.id, 'consume --confirm', ...words))
    if (earlier) this.connection.socket.write(line('a', 'delete_consumer', earlier))
  }

  take(each) {
    const { mine } = this
    if (!mine) return false
    const head = each.toString('latin1', 0, mine.length + 9)
    if (head.startsWith(`${this.id} error `)) {
      const errorId = each.toString('latin1', this.id.length + 7)
      const what = this.isConsuming ? 'another connection uses the id of this consumer, or it is refused now' : 'the server refused the consumer'
      this.connection.fail(new MqksError('REFUSED', `${what}, error ${errorId}`, errorId))
      return true
    }
    if (!head.startsWith(mine)) return false
    if (each.length === mine.length) {
      this.isConsuming = true
      this.isStarted(this)
    } else if (head.endsWith('--update ')) {
      const told = each.subarray(mine.length + 9)
      if (told.length + 200 <= this.connection.options.lineBytesMax) {
        this.told = told.toString('latin1').split(' ').map((word) => Buffer.from(word, 'latin1'))
      }
    } else {
      const message = delivery(each, this, this.life)
      const taker = this.takers.shift()
      if (taker) taker.resolve(message)
      else if (this.messages.push(message) > 1000 && this.options.autoAck) this.connection.socket.pause()
    }
    return true
  }

  end(failure) {
    this.failure = failure
    this.isNotStarted(failure)
    for (const taker of this.takers.splice(0)) taker.fail(failure)
  }

  /** The next message, or undefined after `timeoutMs` without one. */
  receive({ timeoutMs } = {}) {
    if (this.messages.length) {
      if (this.messages.length < 500) this.connection.socket?.resume()
      return Promise.resolve(this.messages.shift())
    }
    if (this.failure) return this.isClosed ? Promise.resolve(undefined) : Promise.reject(this.failure)
    return new Promise((resolve, reject) => {
      let timer
      const taker = {
        resolve: (message) => (clearTimeout(timer), resolve(message)),
        fail: (failure) => (clearTimeout(timer), this.isClosed ? resolve(undefined) : reject(failure)),
      }
      this.takers.push(taker)
      if (timeoutMs !== undefined) {
        timer = setTimeout(() => {
          this.takers.splice(this.takers.indexOf(taker), 1)
          resolve(undefined)
        }, timeoutMs)
      }
    })
  }

  async next() {
    const value = await this.receive()
    return { value, done: value === undefined }
  }

  async return() {
    await this.close()
    return { value: undefined, done: true }
  }

  [Symbol.asyncIterator]() {
    return this
  }

  /** Ends it behind all acks; what is unacked goes back to the queue. */
  async close() {
    if (this.isClosed) return
    this.isClosed = true
    this.messages = []
    const { connection } = this
    if (connection.isUp && !connection.failure) {
      const request = connection.newId()
      connection.socket.resume()
      await connection.ask(request, line(request, 'delete_consumer --confirm', this.id), { timeoutMs: 5000 }).catch(() => {})
    }
    connection.fail(new MqksError('CLOSED', 'the consumer is closed'))
  }
}

class Client {
  constructor(urls, options) {
    const known = { ...DEFAULTS, ...options }
    const strange = Object.keys(known).find((key) => !(key in DEFAULTS))
    if (strange) throw invalid(`there is no option ${strange}`)
    this.options = known
    this.addresses = servers(urls)
    this.consumers = new Set()
    this.connection = new Connection(this.addresses, known)
  }

  /**
   * Publishes a message and returns its id. The promise is kept when the server has stored it. What
   * is not confirmed when the connection is lost is sent again under the same id; with `once`, the
   * default of confirmed messages, the server drops the second copy.
   */
  async publish(event, data, options = {}) {
    const { id, confirm = true, once = confirm, mandatory, delay, at, ttl, priority, key, meta, to, timeoutMs } = options
    const words = [id === undefined ? this.connection.newId() : name(id), 'publish']
    if (confirm) words.push('--confirm')
    if (once) words.push('--once')
    if (mandatory) words.push('--mandatory')
    if (delay !== undefined) words.push(`--delay=${number(delay, 'delay')}`)
    if (at !== undefined) words.push(`--at=${number(at instanceof Date ? at.getTime() / 1000 : at, 'at')}`)
    if (ttl !== undefined) words.push(`--ttl=${number(ttl, 'ttl')}`)
    if (priority !== undefined) words.push(`--priority=${number(priority, 'priority')}`)
    if (key !== undefined) words.push(`--key=${percent(key)}`)
    if (meta && Object.keys(meta).length) words.push(`--meta=${metaText(meta)}`)
    if (to !== undefined) words.push(Buffer.concat([Buffer.from('--to='), name(to)]))
    const [raw, isEscaped] = published(data)
    if (isEscaped) words.push('--escaped')
    const request = line(...words, name(event), raw)
    if (confirm) await this.connection.ask(words[0], request, { timeoutMs })
    else {
      while (this.connection.isFull) await new Promise((resolve) => this.connection.room.push(resolve))
      if (!this.connection.tell(request)) throw new MqksError('CONNECTION', this.connection.reason)
    }
    return words[0].toString()
  }

  /** A consumer of this queue; naming events replaces the bindings of the queue. */
  async consume(queue, ...rest) {
    const options = rest[rest.length - 1]?.constructor === Object ? rest.pop() : {}
    const consumer = new Consumer(this.addresses, this.options, queue, rest.flat(), options)
    this.consumers.add(consumer)
    try {
      return await consumer.started
    } finally {
      if (consumer.failure) this.consumers.delete(consumer)
    }
  }

  /** One message of an existing queue, acked before it is returned; undefined if none is ready. */
  async get(queue, { timeoutMs = 1000 } = {}) {
    const consumer = await this.consume(queue, { prefetch: 1, existing: true })
    try {
      const message = await consumer.receive({ timeoutMs })
      return message && (await message.ack({ confirm: true })) ? message : undefined
    } finally {
      await consumer.close()
      this.consumers.delete(consumer)
    }
  }

  /** Messages of a queue, which stay there. */
  async peek(queue, { limit = 10, after, scheduled } = {}) {
    const words = ['peek', name(queue), `--limit=${number(limit, 'limit')}`]
    if (after !== undefined) words.push(`--after=${number(after, 'after')}`)
    if (scheduled) words.push('--scheduled')
    const id = this.connection.newId()
    const lines = await this.connection.ask(id, line(id, ...words), { isMany: true })
    return lines.map((each) => {
      // The fields of peek, from the right, and then those of a delivery.
      const whole = Buffer.concat([Buffer.from('x ok '), each])
      const first = whole.indexOf(32, 5)
      const second = whole.indexOf(32, first + 1)
      const [, head, retry, traits, meta, seq, time] = /^event=(.*?)(,retry=\d+)?((?:,escaped=1)?(?:,priority=-?\d+)?(?:,key=[^,]*)?)(,meta=[^,]*)?,seq=(\d+),time=(\d+)(?:,due=[\d.]+)?$/s.exec(whole.toString('latin1', first + 1, second))
      const message = new Message(null, 0, whole.subarray(5, first), `${head}${retry || ',retry=0'}${traits}${meta || ',meta='}`, whole.subarray(second + 1))
      return Object.assign(message, { seq: Number(seq), time: new Date(Number(time) / 1000) })
    })
  }

  /** Creates the queue if it is missing, and sets its policy, named as the flags of set_queue. */
  async setQueue(queue, policy = {}) {
    const flags = Object.entries(policy).map(([key, value]) => {
      const flag = `--${key.replace(/[A-Z]/g, (each) => '-' + each.toLowerCase())}`
      if (!/^--[a-z-]+$/.test(flag)) throw invalid(`there is no policy ${key}`)
      if (value === null) return `${flag}=`
      if (typeof value === 'boolean') return `${flag}=${value ? 'yes' : 'no'}`
      const text = [value].flat().map((each) => (typeof each === 'number' ? number(each, key) : name(each).toString())).join(',')
      return `${flag}=${text}`
    })
    await this.request('set_queue --confirm', name(queue), ...flags)
  }

  async subscribe(queue, events = [], { add = [], masks = [] } = {}) {
    await this.request('subscribe --confirm', name(queue), ...bindings({ events, add, masks }))
  }

  async rebind(queue, { events, remove = [], removeMasks = [], add = [], masks = [] } = {}) {
    if (!events && ![remove, removeMasks, add, masks].flat().length) throw invalid('there is nothing to change')
    await this.request('rebind --confirm', name(queue), ...bindings({ events, remove, removeMasks, add, masks }))
  }

  async deleteQueue(queue) {
    await this.request('delete_queue --confirm', name(queue))
  }

  /** Drops all ready messages; how many. */
  async purge(queue) {
    return Number(await this.request('purge --confirm', name(queue)))
  }

  /** Facts about the server, as `stats` tells them. */
  async stats(...words) {
    return JSON.parse(await this.request('stats', ...words))
  }

  /** Any other request that has one answer. */
  async request(...words) {
    if (words.some((word) => /[\n\t]/.test(word.toString('latin1')))) throw invalid('a request must not contain a tab or a newline')
    const id = this.connection.newId()
    return (await this.connection.ask(id, line(id, ...words))).toString()
  }

  /** Ends all consumers and the connection, after the confirms of what was published. */
  async close() {
    await Promise.all([...this.consumers].map((each) => each.close()))
    const { connection } = this
    if (connection.isUp) {
      const id = connection.newId()
      await connection.ask(id, line(id, 'ping closing'), { timeoutMs: 5000 }).catch(() => {})
    }
    connection.fail(new MqksError('CLOSED', 'the client is closed'))
  }
}

function bindings({ events, remove = [], removeMasks = [], add, masks }) {
  const words = (events || []).map(name)
  for (const [flag, names] of [['--remove', remove], ['--remove-mask', removeMasks], ['--add', add], ['--add-mask', masks]]) {
    if (names.length) words.push(flag, ...names.map(name))
  }
  return words
}

/** A client that is connected. `urls` is one URL, several with commas in between, or a list. */
async function connect(urls = process.env.MQKS_URL || `mqks://127.0.0.1:${PORT}`, options = {}) {
  const client = new Client(urls, options)
  await client.connection.ready
  return client
}

module.exports = { connect, Client, Consumer, Message, MqksError }
