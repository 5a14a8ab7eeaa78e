'use strict'
// The client of MQKS for Node.js: the line protocol of docs/protocol.md, in one file.
//
// A connection lives many times: after each loss it comes back, and sends again what has no answer,
// under the old ids. A consumer has a connection of its own, so that a slow one delays no publish.

const crypto = require('node:crypto')
const net = require('node:net')
const tls = require('node:tls')
const { inspect } = require('node:util')

const PORT = 25000
const MIB = 1 << 20
const DEFAULTS = {
  timeoutMs: 30_000,
  connectTimeoutMs: 10_000,
  connectAgain: true,
  closeTimeoutMs: 5000,
  keepAliveMs: 15_000,
  reconnectMinMs: 50,
  reconnectMaxMs: 1000,
  inFlightMax: 10_000,
  inFlightBytesMax: 16 * MIB,
  waitingMax: 250_000,
  waitingBytesMax: 256 * MIB,
  bufferBytesMax: MIB,
  lineBytesMax: MIB,
  replyBytesMax: 64 * MIB,
  name: '',
  tls: undefined,
}
/** So often within keepAliveMs it is looked whether the server is silent. */
const BEATS = 10
/** One `result` waits for so long at most; the next one follows. */
const JOB_WAIT_MS = 60_000
/** How often it is looked whether a batch has ended: at first, and at most. */
const BATCH_WAIT_MS = [50, 1000]
const STATS_ROWS = 1000
const REASON_BYTES_MAX = 512
const META = /^(.*),retry=(\d+)(?:,escaped=1)?(?:,priority=(-?\d+))?(,result=1)?(?:,unique=([^,]*)(?:,until=acked)?(?:,for=[\d.]+)?)?(?:,key=([^,]*))?,meta=(.*)$/s

/** What fails here; `code` is one of those in mqks.d.ts. The server has `reason` under `errorId`. */
class MqksError extends Error {
  constructor(code, message, errorId, reason) {
    super(reason ? `${message}: ${reason}` : message)
    this.name = 'MqksError'
    this.code = code
    if (errorId) this.errorId = errorId
    if (reason) this.reason = reason
  }
}

/** What can't be right, and is not sent: as in Node.js itself, a TypeError with a code. */
const invalid = (why, cause) => Object.assign(new TypeError(why, cause && { cause }), { code: 'INVALID' })

const shown = (value) => inspect(value, { depth: 0, breakLength: Infinity, maxStringLength: 80 }).slice(0, 100)

/** Of options, those that are not known. */
function refuse(strange) {
  for (const key in strange) throw invalid(`there is no option ${key}`)
}

/** Takes the options out of arguments, of which they may be the last one. */
const optionsOf = (given) => (given[given.length - 1]?.constructor === Object ? given.pop() : {})

// -- time

/** A timer that lets what has come meanwhile be read first. One of 2 ** 31 ms or more has no end. */
function after(ms, ends) {
  if (typeof ms !== 'number' || !(ms >= 0)) throw invalid(`a time limit is a number of milliseconds, not ${shown(ms)}`)
  return ms < 2 ** 31 ? setTimeout(() => setImmediate(ends), ms) : undefined
}

/** First in, first out; what waits can be taken out, too. */
class Fifo {
  constructor() {
    this.size = 0
    this.end = {}
    this.end.before = this.end.next = this.end
  }

  get first() {
    return this.end.next.value
  }

  push(value) {
    const place = { value, before: this.end.before, next: this.end }
    place.before.next = place.next.before = place
    this.size++
    return place
  }

  /** Whether it was still there. */
  delete(place) {
    if (!place?.next) return false
    place.before.next = place.next
    place.next.before = place.before
    place.before = place.next = null
    this.size--
    return true
  }

  shift() {
    const { first } = this
    if (this.size) this.delete(this.end.next)
    return first
  }
}

// -- bytes

/** Bytes of a text, or those that a buffer or a view of one has; undefined of anything else. */
function bytes(value) {
  if (ArrayBuffer.isView(value)) return Buffer.from(value.buffer, value.byteOffset, value.byteLength)
  if (value instanceof ArrayBuffer || value instanceof SharedArrayBuffer) return Buffer.from(value)
  if (typeof value !== 'string') return undefined
  if (/\p{Surrogate}/u.test(value)) throw invalid('half of a surrogate pair is no character')
  return Buffer.from(value)
}

/** A name that is valid as a word of a request. */
function name(text) {
  const word = bytes(text)
  if (!word) throw invalid(`a name (of an event, a queue, an id …) must be text, not ${shown(text)}`)
  if (!word.length || word.includes(32) || word.includes(9) || word.includes(10) || (word[0] === 45 && word[1] === 45)) {
    throw invalid(`${shown(text)} is not a name: it is empty, starts with "--", or has a space, tab or newline`)
  }
  return word
}

function names(list) {
  if (!Array.isArray(list)) throw invalid(`a list of names is needed, not ${shown(list)}`)
  return list.map(name)
}

function number(value, what) {
  if (typeof value !== 'number' || !Number.isFinite(value)) throw invalid(`${what} must be a number, not ${shown(value)}`)
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

/** In JSON, an object whose contents are not its properties would arrive as `{}`. */
function plain(key, value) {
  const isEmpty = value && typeof value === 'object' && !Object.keys(value).length
  if (isEmpty && !Array.isArray(value) && ![Object.prototype, null].includes(Object.getPrototypeOf(value))) {
    throw invalid(`${shown(value)} cannot be written as JSON`)
  }
  return value
}

function json(data) {
  const text = typeof data === 'number' && !Number.isFinite(data) ? undefined : JSON.stringify(data)
  if (text === undefined) throw invalid(`${shown(data)} cannot be written as JSON`)
  if (text.includes('{}')) JSON.stringify(data, plain)
  return Buffer.from(text)
}

/** The data of a message as they are sent, and whether they are escaped. */
function published(data) {
  const raw = bytes(data) ?? json(data)
  const fits = !raw.includes(10) && !raw.includes(9) && raw[raw.length - 1] !== 13
  return fits ? [raw, false] : [escape(raw), true]
}

function percent(text, what) {
  if (typeof text !== 'string') throw invalid(`${what} must be text, not ${shown(text)}`)
  bytes(text)
  return encodeURIComponent(text).replace(/[!'()*]/g, (each) => '%' + each.charCodeAt(0).toString(16).toUpperCase())
}

function unpercent(text) {
  if (!text.includes('%')) return text
  const raw = Buffer.from(text, 'latin1').toString('latin1').replace(/%([0-9a-fA-F]{2})/g, (_, hex) => String.fromCharCode(parseInt(hex, 16)))
  return Buffer.from(raw, 'latin1').toString()
}

function metaOf(text) {
  const meta = {}
  for (const pair of text ? text.split('&') : []) {
    const at = pair.indexOf('=')
    Object.defineProperty(meta, unpercent(pair.slice(0, at)), { value: unpercent(pair.slice(at + 1)), configurable: true, enumerable: true, writable: true })
  }
  return meta
}

function metaText(meta) {
  if (meta === null || typeof meta !== 'object' || ![Object.prototype, null].includes(Object.getPrototypeOf(meta))) {
    throw invalid(`meta must be an object of texts, not ${shown(meta)}`)
  }
  return Object.entries(meta).map(([key, value]) => `${percent(key, 'a name in meta')}=${percent(value, `meta.${key}`)}`).join('&')
}

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
    let words
    try {
      words = [url.username, url.password].filter(Boolean).map(decodeURIComponent)
    } catch {
      throw invalid('a % in the credentials of a URL is %25')
    }
    if (words.some((word) => /\s/.test(word))) throw invalid('credentials must not contain white space')
    const host = url.hostname.replace(/^\[|\]$/g, '') || '127.0.0.1'
    const port = url.port === '' ? PORT : Number(url.port)
    const path = kind === 'mqks+unix:' ? decodeURIComponent(url.pathname) : ''
    return { host, port, path, isTls: kind === 'mqkss:', credentials: words, name: url.searchParams.get('name') || '', told: path || `${host}:${port}` }
  })
}

/** The server wants other credentials, or some. */
function refused(server, errorId) {
  if (server.credentials.length) return new MqksError('AUTH', `the server refused the credentials, error ${errorId}`, errorId)
  const reason = 'it requires credentials, as in mqks://USER:PASSWORD@HOST or mqks://TOKEN@HOST'
  return new MqksError('AUTH', `the server refused the connection, error ${errorId}`, errorId, reason)
}

/** Why a connection has failed: a host with several addresses gives several errors. */
const why = (error) => error.errors?.map(why).join(', ') || error.message || error.code

// -- one connection over all its lives

class Connection {
  /** `hooks` are called: `up` and `down` with each life, `reply` with each line, `fail` at the end. */
  constructor(addresses, options, hooks = {}) {
    this.addresses = addresses
    this.options = options
    this.hooks = hooks
    this.prefix = crypto.randomBytes(8).toString('hex')
    this.count = 0
    this.next = 0
    this.failures = this.tried = 0
    this.reasons = new Map()
    this.inFlight = new Map()
    this.inFlightBytes = 0
    this.waiting = new Fifo()
    this.waitingBytes = 0
    this.isUp = this.wasUp = this.hasTold = false
    this.failure = null
    this.socket = null
    this.reason = 'no answer yet'
    this.ready = new Promise((resolve, reject) => Object.assign(this, { isReady: resolve, isNotReady: reject }))
    this.ready.catch(() => {})
  }

  get state() {
    return this.isUp ? 'connected' : this.reason
  }

  newId() {
    return `${this.prefix}-${++this.count}`
  }

  open() {
    const { options } = this
    const server = this.addresses[this.next++ % this.addresses.length]
    const where = server.path ? { path: server.path } : { host: server.host, port: server.port }
    let socket
    try {
      socket = server.isTls ? tls.connect({ ...where, servername: net.isIP(server.host) ? '' : server.host, ...options.tls }) : net.connect(where)
    } catch (error) {
      return this.fail(invalid(`the options of the connection are wrong: ${error.message}`, error))
    }
    const lines = new Lines(options.replyBytesMax)
    const greeting = this.newId()
    const words = server.credentials
    const hello = [line(greeting, words.length ? `auth --confirm ${words.join(' ')}` : 'ping hello')]
    const called = server.name || options.name
    if (called) hello.push(line(this.newId(), 'set_name', name(called)))
    this.socket = socket
    socket.setNoDelay(true)
    let end = 'the server closed the connection'
    let quietBeats = 0
    let beats
    const late = after(options.connectTimeoutMs / this.addresses.length, () => this.isUp || socket.destroy(new Error('no answer in time')))
    // Beats are counted, not time: while this process stands still nothing can be heard, and a
    // ping has all of its beats to be answered.
    const beat = () => {
      if (socket.isPaused()) quietBeats = 0
      else if (++quietBeats === BEATS && this.isUp) this.write(line(this.newId(), 'ping alive'))
      else if (quietBeats >= 2 * BEATS) {
        setImmediate(() => quietBeats >= 2 * BEATS && socket.destroy(new Error(`no answer to a ping for ${options.keepAliveMs / 1000} s`)))
      }
    }
    socket.once(server.isTls ? 'secureConnect' : 'connect', () => {
      socket.write(Buffer.concat(hello))
      if (options.keepAliveMs < 2 ** 31) beats = setInterval(beat, options.keepAliveMs / BEATS)
    })
    socket.on('data', (chunk) => {
      quietBeats = 0
      if (this.failure) return
      try {
        for (const each of lines.feed(chunk)) {
          const start = each.toString('latin1', 0, greeting.length + 6)
          if (!this.isUp && start.startsWith(`${greeting} `)) {
            clearTimeout(late)
            if (start.endsWith(' error')) throw refused(server, each.toString().split(' ')[2])
            this.up()
          } else if (start.startsWith('- error ')) end = each.toString().slice(8)
          else if (!this.isUp || !each.includes(32)) throw new MqksError('PROTOCOL', 'the peer is not an MQKS server')
          else if (!this.hooks.reply?.(each)) this.reply(each)
        }
      } catch (error) {
        this.fail(error instanceof MqksError ? error : new MqksError('PROTOCOL', `a line of the server cannot be read: ${error.message}`))
      }
      this.wake()
    })
    socket.on('drain', () => this.wake())
    socket.on('error', (error) => (end = why(error)))
    socket.on('close', () => {
      clearTimeout(late)
      clearInterval(beats)
      this.socket = null
      this.isUp = false
      if (!this.failure) this.lost(server, end)
    })
  }

  up() {
    this.isUp = this.wasUp = true
    this.failures = this.tried = 0
    this.reasons.clear()
    this.hooks.up?.()
    for (const call of this.inFlight.values()) {
      if (call.isMany) call.lines = []
      this.write(call.line)
    }
    this.isReady()
  }

  lost(server, reason) {
    this.reasons.set(server.told, reason)
    this.reason = this.addresses.length === 1 ? reason : [...this.reasons].map((each) => each.join(': ')).join('; ')
    this.hooks.down?.()
    if (!this.wasUp && !this.options.connectAgain && ++this.tried >= this.addresses.length) {
      return this.fail(new MqksError('CONNECTION', this.reason))
    }
    const wait = Math.min(this.options.reconnectMaxMs, this.options.reconnectMinMs * 2 ** Math.min(this.failures++, 20), 2 ** 31 - 1)
    this.timer = setTimeout(() => this.open(), wait * (0.5 + 0.5 * Math.random()))
  }

  /** Ends it for good. */
  fail(failure) {
    if (this.failure) return
    this.failure = failure
    clearTimeout(this.timer)
    const { socket } = this
    if (this.isUp) {
      socket.end()
      setTimeout(() => socket.destroy(), 2000).unref()
    } else socket?.destroy()
    this.isUp = false
    this.reject(failure)
    this.isNotReady(failure)
    this.hooks.fail?.(failure)
  }

  /** Ends all calls. */
  reject(error) {
    for (const call of this.inFlight.values()) this.out(call).reject(error)
    while (this.waiting.size) this.out(this.waiting.first).reject(error)
  }

  reply(each) {
    const text = each.toString('latin1')
    const at = text.indexOf(' ')
    const call = this.inFlight.get(text.slice(0, at))
    if (!call) return
    const rest = text.slice(at + 1)
    if (rest.startsWith('error ')) {
      const errorId = rest.slice(6)
      this.out(call).reject(new MqksError('REFUSED', `the server refused the request, error ${errorId}`, errorId))
    } else if (!rest.startsWith('ok ')) throw new MqksError('PROTOCOL', `a reply is neither ok nor an error: ${rest.slice(0, 100)}`)
    else {
      const answer = each.subarray(at + 4)
      if (call.isMany && !/^--end( |$)/.test(answer.toString('latin1', 0, 6))) call.lines.push(answer)
      else this.out(call).resolve(call.isMany ? call.lines : answer)
    }
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

  /**
   * Sends a request when there is room, behind those that wait already. Its answer, which may come
   * in a later life; without an `id` it has none, and is done when it is written.
   */
  ask(id, request, { isMany = false, timeoutMs = this.options.timeoutMs } = {}) {
    return new Promise((resolve, reject) => {
      this.check(request)
      if (this.failure) throw this.failure
      const key = id && bytes(id).toString('latin1')
      const call = { key, line: request, resolve, reject, isMany, lines: isMany && [], place: undefined, timer: after(timeoutMs, () => this.late(call)) }
      if (!this.waiting.size && this.hasRoom(call)) this.send(call)
      else this.wait(call)
    })
  }

  hasRoom({ key }) {
    const { inFlightMax, inFlightBytesMax } = this.options
    if (key) return this.inFlight.size < inFlightMax && this.inFlightBytes < inFlightBytesMax
    return this.isUp && !(this.socket.writableNeedDrain && this.socket.writableLength > MIB)
  }

  send(call) {
    if (!call.key) {
      this.hasTold = true
      this.write(call.line)
      this.out(call).resolve()
    } else if (this.inFlight.has(call.key)) this.out(call).reject(invalid('a request with this id is already in flight'))
    else {
      this.inFlight.set(call.key, call)
      this.inFlightBytes += call.line.length
      if (this.isUp) this.write(call.line)
    }
  }

  wait(call) {
    const { waitingMax, waitingBytesMax } = this.options
    if (this.waiting.size >= waitingMax || this.waitingBytes + call.line.length > waitingBytesMax) {
      const waiting = `${this.waiting.size} requests with ${this.waitingBytes} bytes wait already`
      return this.out(call).reject(new MqksError('UNSENT', `${waiting} (waitingMax, waitingBytesMax)`))
    }
    this.waitingBytes += call.line.length
    call.place = this.waiting.push(call)
  }

  /** Sends what waits and has room now. */
  wake() {
    for (let call; (call = this.waiting.first) && this.hasRoom(call); this.send(call)) this.unwait(call)
  }

  /** Whether it has waited. */
  unwait(call) {
    const isOut = this.waiting.delete(call.place)
    if (isOut) this.waitingBytes -= call.line.length
    return isOut
  }

  /** Takes a call out of where it is. */
  out(call) {
    clearTimeout(call.timer)
    if (!this.unwait(call) && this.inFlight.get(call.key) === call) {
      this.inFlight.delete(call.key)
      this.inFlightBytes -= call.line.length
    }
    return call
  }

  late(call) {
    const isUnsent = Boolean(call.place?.next)
    if (!isUnsent && this.inFlight.get(call.key) !== call) return
    const told = isUnsent
      ? ['UNSENT', `no room to send the request in time (${this.state})`]
      : ['TIMEOUT', `no reply in time (${this.state}); whether the request was executed is unknown`]
    this.out(call).reject(new MqksError(...told))
    this.wake()
  }

  /** Sends what nobody waits for, if it can be sent now; whether it was. */
  tell(request) {
    this.check(request)
    if (this.isUp) this.write(request)
    return this.isUp
  }
}

// -- what programs use

/** One message that was delivered, or peeked at. */
class Message {
  constructor(consumer, life, rawId, traits, data) {
    const escaped = traits.includes(',escaped=1')
    const [, event, retry, priority, result, unique, key, meta] = META.exec(traits) || [null, traits, '0', undefined, undefined, undefined, undefined, '']
    this.consumer = consumer
    this.life = life
    this.rawId = rawId
    this.id = rawId.toString()
    this.event = Buffer.from(event, 'latin1').toString()
    this.retry = Number(retry)
    this.priority = Number(priority || 0)
    this.key = key === undefined ? undefined : unpercent(key)
    this.unique = unique === undefined ? undefined : unpercent(unique)
    this.meta = metaOf(meta)
    this.data = escaped ? unescape(data) : data
    this.wantsResult = result !== undefined
    this.isSettled = false
    /** Of the cancel that its consumer was told of. */
    this.cancelReason = undefined
  }

  /** Aborted when somebody cancels it, if its consumer is `cancellable`. */
  get signal() {
    if (!this.controller) {
      this.controller = new AbortController()
      if (this.cancelReason !== undefined) this.cancel(this.cancelReason)
    }
    return this.controller.signal
  }

  cancel(reason) {
    this.cancelReason = reason
    this.controller?.abort(new MqksError('CANCELLED', `message ${this.id} was cancelled`, undefined, reason))
  }

  get text() {
    return this.data.toString()
  }

  json() {
    return JSON.parse(this.text)
  }

  /** Processed: it is removed; `result` is kept if it was published with `keepResult`. */
  async ack({ result, ...options } = {}) {
    return this.settle('ack', result === undefined ? [] : [Buffer.concat([Buffer.from('--result='), json(result)])], options)
  }

  /** How far the work on it is, from 0 to 100, with a text of at most 200 bytes; restarts its ack timeout. */
  async progress(percent, text = '', options = {}) {
    if (!Number.isInteger(percent) || percent < 0 || percent > 100) throw invalid(`a progress is a whole number from 0 to 100, not ${shown(percent)}`)
    if (typeof text !== 'string' || Buffer.byteLength(text) > 200) throw invalid('the text of a progress has at most 200 bytes')
    const words = text.trim().split(/\s+/).filter(Boolean)
    return this.settle('progress', [String(percent), ...words], options)
  }

  /** Back to the tail of its queue; `dead` makes it a dead letter at once. */
  async reject({ dead = false, delay, reason, ...options } = {}) {
    const flags = []
    if (dead) flags.push('--dead')
    if (delay !== undefined) flags.push(`--delay=${number(delay, 'delay')}`)
    if (reason !== undefined) flags.push(`--reason=${percent(reason, 'reason')}`)
    return this.settle('reject', flags, options)
  }

  /** Back to its old place, as if it had not been delivered. */
  async release({ delay, ...options } = {}) {
    return this.settle('release', delay === undefined ? [] : [`--delay=${number(delay, 'delay')}`], options)
  }

  /** More time before the ack timeout. */
  async touch({ for: seconds, ...options } = {}) {
    return this.settle('touch', seconds === undefined ? [] : [`--for=${number(seconds, 'for')}`], options)
  }

  /**
   * Whether the server was told, or has confirmed it. When the connection of the delivery is lost,
   * the message is no longer this consumer's, and what has waited for room or for a confirm is LOST.
   */
  async settle(verb, flags, { confirm = false, timeoutMs, ...strange } = {}) {
    refuse(strange)
    const { connection, client, id, life, given } = this.consumer ?? {}
    if (!connection?.isUp || life !== this.life || given.autoAck || this.isSettled) return false
    const request = confirm ? connection.newId() : undefined
    const words = line(request ?? 'a', confirm ? `${verb} --confirm` : verb, id, this.rawId, ...flags)
    connection.check(words)
    this.isSettled = !['touch', 'progress'].includes(verb)
    if (this.isSettled) this.consumer.settled(this)
    if (!confirm) return connection.tell(words)
    this.consumer.resume()
    try {
      await connection.ask(request, words, { timeoutMs })
      return true
    } catch (error) {
      if (error.code === 'LOST') return false
      if (['UNSENT', 'REFUSED'].includes(error.code)) {
        this.isSettled = false
        this.consumer.holds(this)
      }
      throw await client.explained(error)
    }
  }
}

function delivery(each, consumer, life) {
  const first = each.indexOf(32)
  const second = each.indexOf(32, first + 4)
  const third = each.indexOf(32, second + 1)
  const traits = each.toString('latin1', second + 7, third)
  return new Message(consumer, life, each.subarray(first + 4, second), traits, each.subarray(third + 1))
}

/** What a message takes in memory, roughly. */
const bytesOf = (message) => message.data.length + 200

/** Messages of a queue: an async iterator. */
class Consumer {
  constructor(client, queue, events, given) {
    const { add = [], masks = [], deleteWhenUnused: rule = false, autoAck, prefetch = 100, ackTimeout, backoff, cancellable, existing, keep, timeoutMs, ...strange } = given
    refuse(strange)
    if (autoAck && cancellable) throw invalid('cancellable is for unacked messages, and autoAck leaves none')
    /** By id, those that are not settled, of a consumer that is told of cancels. */
    this.held = cancellable ? new Map() : undefined
    this.client = client
    this.given = given
    this.life = 0
    this.messages = new Fifo()
    this.bytes = 0
    this.takers = new Fifo()
    this.failure = null
    this.words = [name(queue), ...names(events)]
    if (add.length) this.words.push('--add', ...names(add))
    if (masks.length) this.words.push('--add-mask', ...names(masks))
    if (rule !== false) this.words.push(rule === true ? '--delete-queue-when-unused' : `--delete-queue-when-unused=${number(rule, 'deleteWhenUnused')}`)
    if (!autoAck) {
      this.words.push('--manual-ack')
      if (prefetch) this.words.push(`--prefetch=${number(prefetch, 'prefetch')}`)
      if (ackTimeout !== undefined) this.words.push(`--ack-timeout=${number(ackTimeout, 'ackTimeout')}`)
      if (backoff !== undefined) this.words.push(`--backoff=${[backoff].flat().map((each) => number(each, 'backoff'))}`)
    }
    this.words.push('--meta')
    if (cancellable) this.words.push('--cancellable')
    if (existing) this.words.push('--existing')
    if (keep ?? !(events.length || add.length || masks.length)) this.words.push('--keep')
    this.isConsuming = this.isClosed = false
    this.started = new Promise((resolve, reject) => Object.assign(this, { isStarted: resolve, isNotStarted: reject }))
    this.started.catch(() => {})
    this.connection = new Connection(client.addresses, client.options, {
      up: () => this.begin(),
      // What was delivered goes back by itself, and its confirms never come.
      down: () => this.connection.reject(new MqksError('LOST', 'the connection was lost before the confirm')),
      reply: (each) => this.take(each),
      fail: (failure) => this.end(failure),
    })
    this.connection.check(line('x'.repeat(60), 'consume --confirm', ...this.words))
    client.consumers.add(this)
    this.connection.open()
  }

  begin() {
    if (!this.given.autoAck) this.drop()
    this.held?.clear()
    const earlier = this.id
    this.id = this.connection.newId()
    this.mine = `${this.id} ok `
    this.life++
    this.isConfirmed = false
    let words = this.words
    if (this.isConsuming) {
      words = this.told || words
      const [queue, ...rest] = words
      const isEvent = rest.length && !rest[0].toString('latin1').startsWith('--')
      words = [queue, ...(isEvent ? ['--add'] : []), ...rest]
      if (this.given.existing && !words.includes('--existing')) words.push('--existing')
      if (!words.includes('--keep')) words.push('--keep')
    }
    this.connection.socket.write(line(this.id, 'consume --confirm', ...words))
    if (earlier) this.connection.socket.write(line('a', 'delete_consumer', earlier))
  }

  take(each) {
    const { connection, mine } = this
    if (!mine) return false
    const head = each.toString('latin1', 0, mine.length + 9)
    if (head.startsWith(`${this.id} error `)) {
      const errorId = each.toString('latin1', this.id.length + 7)
      const what = this.isConfirmed ? 'another connection uses the id of this consumer' : 'the server refused the consumer'
      connection.fail(new MqksError(this.isConfirmed ? 'REPLACED' : 'REFUSED', `${what}, error ${errorId}`, errorId))
      return true
    }
    if (!head.startsWith(mine)) return false
    if (each.length === mine.length) {
      this.isConsuming = this.isConfirmed = true
      this.isStarted(this)
    } else if (head.endsWith('--update ')) {
      const told = each.subarray(mine.length + 9)
      if (told.length + 200 <= connection.options.lineBytesMax) {
        this.told = told.toString('latin1').split(' ').map((word) => Buffer.from(word, 'latin1'))
      }
    } else if (head.endsWith('--cancel ')) {
      const [id, reason = ''] = each.toString('latin1', mine.length + 9).split(' ')
      this.held?.get(id)?.cancel(unpercent(reason))
    } else if (!this.isClosed) {
      const message = delivery(each, this, this.life)
      this.holds(message)
      const taker = this.takers.shift()
      if (taker) taker.resolve(message)
      else {
        this.messages.push(message)
        this.bytes += bytesOf(message)
        // A confirm comes behind the messages.
        if (this.bytes > connection.options.bufferBytesMax && !connection.inFlight.size) connection.socket.pause()
      }
    }
    return true
  }

  holds(message) {
    if (message.life === this.life) this.held?.set(message.rawId.toString('latin1'), message)
  }

  settled(message) {
    const id = message.rawId.toString('latin1')
    if (this.held?.get(id) === message) this.held.delete(id)
  }

  late() {
    const { connection } = this
    if (!this.isConsuming) connection.fail(new MqksError('TIMEOUT', `the consumer has not started in time (${connection.state})`))
  }

  /** Reads on. */
  resume() {
    this.connection.socket?.resume()
  }

  drop() {
    this.messages = new Fifo()
    this.bytes = 0
  }

  end(failure) {
    this.failure = failure
    this.client.consumers.delete(this)
    this.isNotStarted(failure)
    while (this.takers.size) this.takers.shift().fail(failure)
  }

  /** The next message, or undefined after `timeoutMs` without one. */
  async receive({ timeoutMs = Infinity, ...strange } = {}) {
    refuse(strange)
    const message = this.messages.shift()
    if (message) {
      this.bytes -= bytesOf(message)
      if (this.bytes <= this.connection.options.bufferBytesMax / 2) this.resume()
      return message
    }
    if (this.failure && !this.isClosed) throw this.failure
    if (this.failure) return undefined
    return new Promise((resolve, reject) => {
      const timer = after(timeoutMs, () => this.takers.delete(place) && resolve(undefined))
      const place = this.takers.push({
        resolve: (value) => (clearTimeout(timer), resolve(value)),
        fail: (failure) => (clearTimeout(timer), this.isClosed ? resolve(undefined) : reject(failure)),
      })
    })
  }

  /**
   * Calls `handler(message, { signal })` for each message, `concurrency` at a time, until the
   * consumer is closed. A message is acked when its handler has ended, with what it has returned as
   * the result if somebody keeps that, and rejected if it throws; one that was cancelled is acked.
   */
  async handle(handler, { concurrency = 1, ...strange } = {}) {
    refuse(strange)
    if (typeof handler !== 'function') throw invalid(`a handler is a function, not ${shown(handler)}`)
    if (!Number.isInteger(concurrency) || concurrency < 1) throw invalid(`concurrency must be a whole number from 1, not ${shown(concurrency)}`)
    if (this.given.autoAck) throw invalid('a handler acks, and autoAck leaves nothing to ack')
    const work = async () => {
      for (let message; (message = await this.receive()); ) await this.handleOne(handler, message)
    }
    await Promise.all(Array.from({ length: concurrency }, work))
  }

  async handleOne(handler, message) {
    if (message.cancelReason !== undefined) return message.ack()
    try {
      const result = await handler(message, { signal: message.signal })
      // Whether there is room for a result, only the confirm says.
      return await message.ack(message.wantsResult && result !== undefined ? { result, confirm: true } : {})
    } catch (error) {
      if (message.isSettled) throw error
      if (message.cancelReason !== undefined) return message.ack()
      const reason = Buffer.from(`${error?.name ?? 'Error'}: ${error?.message ?? error}`).subarray(0, REASON_BYTES_MAX)
      return message.reject({ reason: reason.toString().replace(/\uFFFD+$/, '') })
    }
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
  close({ timeoutMs = this.client.options.closeTimeoutMs } = {}) {
    this.closing ??= this.leave(timeoutMs)
    return this.closing
  }

  async leave(timeoutMs) {
    const { connection } = this
    this.isClosed = true
    this.drop()
    if (connection.isUp) {
      const request = connection.newId()
      this.resume()
      await connection.ask(request, line(request, 'delete_consumer --confirm', this.id), { timeoutMs }).catch(() => {})
    }
    connection.fail(new MqksError('CLOSED', 'the consumer is closed'))
  }
}

/** A message whose end is known: one that was published with `keepResult`. */
class Job {
  constructor(client, id) {
    this.client = client
    this.id = id
  }

  /** What has become of it; with `waitMs`, at most 60,000, not before its end or this time. */
  async state({ waitMs = 0, timeoutMs = waitMs + this.client.options.timeoutMs, ...strange } = {}) {
    refuse(strange)
    const { client } = this
    const id = client.connection.newId()
    const answer = await client.ask(id, line(id, 'result', name(this.id), `--wait=${number(waitMs / 1000, 'waitMs')}`), { timeoutMs })
    const [, state, queue, more] = /^(\S+)(?: (\S+)(?: (.*))?)?$/s.exec(answer.toString('latin1')) ?? []
    if (!state) throw new MqksError('PROTOCOL', 'the server told no state of a message')
    const told = { state, hasEnded: !['waiting', 'running'].includes(state), queue: queue && Buffer.from(queue, 'latin1').toString() }
    if (state === 'done' && more !== undefined) told.data = Buffer.from(more, 'latin1')
    else if (state === 'running' && more) {
      const [percent, ...text] = Buffer.from(more, 'latin1').toString().split(' ')
      told.progress = Number(percent)
      told.text = text.join(' ')
    } else if (more) told.reason = unpercent(more)
    return told
  }

  /** In percent, as its consumer has told it last; undefined if it has not. */
  async progress(options) {
    return (await this.state(options)).progress
  }

  /** Its result, when it has ended; undefined if it was acked without one. NO_RESULT if it has ended otherwise. */
  async result({ timeoutMs = Infinity, ...strange } = {}) {
    refuse(strange)
    if (typeof timeoutMs !== 'number' || !(timeoutMs >= 0)) throw invalid(`a time limit is a number of milliseconds, not ${shown(timeoutMs)}`)
    const endsMs = performance.now() + timeoutMs
    for (;;) {
      const leftMs = Math.max(0, endsMs - performance.now())
      const { state, hasEnded, data, reason } = await this.state({ waitMs: Math.min(JOB_WAIT_MS, leftMs) })
      if (state === 'done') return data && told(data)
      if (hasEnded) throw new MqksError('NO_RESULT', `the job ${this.id} has no result, it is ${state}`, undefined, reason)
      if (!leftMs) throw new MqksError('TIMEOUT', `the job ${this.id} has not ended in ${timeoutMs} ms`)
    }
  }

  /** Cancels it, as `client.cancelJob` does. */
  async cancel(options) {
    const { queue, hasEnded } = await this.state()
    return queue === undefined || hasEnded ? 'none' : this.client.cancelJob(queue, this.id, options)
  }
}

/** Messages that are counted together; when all of them are done, a message is published. */
class Batch {
  constructor(client, batch) {
    this.client = client
    this.name = batch
  }

  /** Publishes a message of the batch. */
  publish(event, data, options) {
    return this.client.publish(event, data, { ...options, batch: this.name })
  }

  /** It ends when all of its messages are done; with `discard` it is forgotten. Whether there was one. */
  close(options) {
    return this.client.closeBatch(this.name, options)
  }

  /** What it counts; undefined if there is none, as after its end. */
  counts(options) {
    return this.client.batchCounts(this.name, options)
  }

  /** Until it has ended, expired, or is forgotten. */
  async wait({ timeoutMs = Infinity, ...strange } = {}) {
    refuse(strange)
    let isLate = false
    const timer = after(timeoutMs, () => (isLate = true))
    try {
      for (let [pauseMs, pauseMsMax] = BATCH_WAIT_MS; await this.counts(); pauseMs = Math.min(2 * pauseMs, pauseMsMax)) {
        if (isLate) throw new MqksError('TIMEOUT', `the batch ${this.name} has not ended in ${timeoutMs} ms`)
        await new Promise((resolve) => setTimeout(resolve, pauseMs))
      }
    } finally {
      clearTimeout(timer)
    }
  }
}

class Client {
  constructor(urls, options = {}) {
    const { ...known } = DEFAULTS
    for (const [key, value] of Object.entries(options)) {
      if (!(key in DEFAULTS)) refuse({ [key]: value })
      if (value === undefined) continue
      const kind = typeof (DEFAULTS[key] ?? {})
      if (typeof value !== kind || (kind === 'number' && !(value > 0))) {
        throw invalid(`${key} must be a ${kind === 'number' ? 'positive number' : kind}, not ${shown(value)}`)
      }
      known[key] = value
    }
    this.options = known
    this.addresses = servers(urls)
    for (const each of [known, ...this.addresses]) if (each.name) name(each.name)
    this.consumers = new Set()
    this.connection = new Connection(this.addresses, known)
    this.explain = async (error) => {
      throw await this.explained(error)
    }
    this.connection.open()
  }

  /** The answer to a request. */
  ask(id, request, how) {
    return this.connection.ask(id, request, how).catch(this.explain)
  }

  /** A refusal with its reason, which the server tells to those who have authenticated. */
  async explained(error) {
    const { message, code, errorId, reason } = error
    if (code !== 'REFUSED' || reason) return error
    try {
      const told = await this.reason(errorId, { timeoutMs: 2000 })
      return told ? new MqksError(code, message, errorId, told) : error
    } catch (failure) {
      const [server] = this.addresses
      return failure.code === 'REFUSED' && !server.credentials.length ? refused(server, errorId) : error
    }
  }

  /** The reason of an error, which the server knows for a while. */
  async reason(errorId, { timeoutMs, ...strange } = {}) {
    refuse(strange)
    const id = this.connection.newId()
    const rows = told(await this.connection.ask(id, line(id, 'stats errors', name(errorId)), { timeoutMs }))
    if (Array.isArray(rows) && rows.every((each) => typeof each?.reason === 'string')) return rows[0]?.reason
    throw new MqksError('PROTOCOL', 'the server told no reason of an error')
  }

  /**
   * Publishes a message and returns its id. The promise is kept when the server has stored it. What
   * is not confirmed when the connection is lost is sent again under the same id; with `once`, the
   * default of confirmed messages, the server drops the second copy.
   */
  async publish(event, data, { timeoutMs, ...options } = {}) {
    const [id, request, confirm] = publishing(this.connection.newId(), event, data, options)
    const text = id.toString()
    // An await would keep all of this in memory for as long as the message waits.
    return this.ask(confirm ? id : undefined, request, { timeoutMs }).then(() => text)
  }

  /** As publish with `unique`, confirmed; tells what became of it. */
  async publishUnique(event, data, unique, { timeoutMs, ...options } = {}) {
    const [id, request] = publishing(this.connection.newId(), event, data, { ...options, unique, confirm: true })
    const own = id.toString()
    const [what, other] = (await this.ask(id, request, { timeoutMs })).toString().split(' ')
    // Its own id: it was sent again, since its confirm was lost.
    const known = other === own ? undefined : other
    return { id: own, duplicateOf: what === 'duplicate' ? known : undefined, replaced: what === 'replaced' ? known : undefined }
  }

  /** Publishes a message as a job, whose end is known until `keepResult` seconds after it. */
  async submit(event, data, { keepResult = 3600, ...options } = {}) {
    return this.job(await this.publish(event, data, { ...options, keepResult, confirm: true }))
  }

  /** The job of the message with this id. */
  job(id) {
    return new Job(this, id)
  }

  /** `cancelled`: it has waited, and is removed; `told`: its consumer was told; `held`: it was not; `none`: it is not there. */
  async cancelJob(queue, id, { reason, timeoutMs, ...strange } = {}) {
    refuse(strange)
    const flags = reason ? [`--reason=${percent(reason, 'reason')}`] : []
    return this.request('cancel_job --confirm', name(queue), name(id), ...flags, { timeoutMs })
  }

  /** Opens a batch, or sets what follows one that is open: `[event, data, options]`. */
  async openBatch(batch = this.connection.newId(), { then, onDead, for: seconds, timeoutMs, ...strange } = {}) {
    refuse(strange)
    const flags = seconds === undefined ? [] : [`--for=${number(seconds, 'for')}`]
    const wanted = [[flags, then], ...(onDead ? [[['--on-dead'], onDead]] : [])].map(([each, follows]) => [...each, ...following(follows)])
    for (const each of wanted) {
      const id = this.connection.newId()
      await this.ask(id, line(id, 'open_batch --confirm', name(batch), ...each), { timeoutMs })
    }
    return this.batch(batch)
  }

  /** The batch of this name. */
  batch(batch) {
    return new Batch(this, batch)
  }

  /** Whether there was one. */
  async closeBatch(batch, { discard = false, timeoutMs, ...strange } = {}) {
    refuse(strange)
    return (await this.request('close_batch --confirm', name(batch), ...(discard ? ['--discard'] : []), { timeoutMs })) === '1'
  }

  /** What a batch counts; undefined if there is none, as after its end. */
  async batchCounts(batch, { timeoutMs, ...strange } = {}) {
    refuse(strange)
    try {
      return told(await this.request('batch', name(batch), { timeoutMs }))
    } catch (error) {
      if (error.code === 'REFUSED' && error.reason?.includes('there is no batch')) return undefined
      throw error
    }
  }

  /** All batches that have not ended, by name. */
  async batches() {
    const all = []
    for (let rows, after = []; (rows = await this.stats('batches', `--limit=${STATS_ROWS}`, ...after)).length; all.push(...rows)) {
      after = [`--after=${rows[rows.length - 1].name}`]
    }
    return all
  }

  /** A consumer of this queue; naming events replaces the bindings of the queue. */
  async consume(queue, ...rest) {
    const options = optionsOf(rest)
    const failure = this.connection.failure ?? (this.closing && new MqksError('CLOSED', 'the client is closed'))
    if (failure) throw failure
    const { timeoutMs = this.options.timeoutMs } = options
    let consumer
    const late = after(timeoutMs, () => consumer.late())
    try {
      consumer = new Consumer(this, queue, rest.flat(), options)
      return await consumer.started
    } catch (error) {
      throw await this.explained(error)
    } finally {
      clearTimeout(late)
    }
  }

  /** One message of an existing queue, acked before it is returned; undefined if none is ready. */
  async get(queue, { timeoutMs = 1000, ...strange } = {}) {
    refuse(strange)
    // Of the time for a message, the server needs some for its answers.
    const answers = { timeoutMs: Math.max(timeoutMs, 1000) }
    const consumer = await this.consume(queue, { prefetch: 1, existing: true, ...answers })
    try {
      const message = await consumer.receive({ timeoutMs })
      return message && (await message.ack({ confirm: true, ...answers })) ? message : undefined
    } finally {
      await consumer.close(answers)
    }
  }

  /** Messages of a queue, which stay there. */
  async peek(queue, { limit = 10, after, scheduled, soonest, ...strange } = {}) {
    refuse(strange)
    const words = ['peek', name(queue), `--limit=${number(limit, 'limit')}`]
    if (after !== undefined) words.push(`--after=${number(after, 'after')}`)
    if (scheduled) words.push('--scheduled')
    if (soonest) words.push('--soonest')
    const id = this.connection.newId()
    const lines = await this.ask(id, line(id, ...words), { isMany: true })
    return lines.map((each) => {
      // The fields of peek, from the right, and then those of a delivery.
      const whole = Buffer.concat([Buffer.from('x ok '), each])
      const first = whole.indexOf(32, 5)
      const second = whole.indexOf(32, first + 1)
      const [, head, retry, traits, meta, seq, time] = /^event=(.*?)(,retry=\d+)?((?:,escaped=1)?(?:,priority=-?\d+)?(?:,result=1)?(?:,unique=[^,]*(?:,until=acked)?(?:,for=[\d.]+)?)?(?:,key=[^,]*)?)(,meta=[^,]*)?,seq=(\d+),time=(\d+)(?:,due=[\d.]+)?$/s.exec(whole.toString('latin1', first + 1, second))
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

  async subscribe(queue, events = [], { add = [], masks = [], ...strange } = {}) {
    refuse(strange)
    await this.request('subscribe --confirm', name(queue), ...bindings({ events, add, masks }))
  }

  async rebind(queue, { events, remove = [], removeMasks = [], add = [], masks = [], ...strange } = {}) {
    refuse(strange)
    if (!events && ![remove, removeMasks, add, masks].flat().length) throw invalid('there is nothing to change')
    await this.request('rebind --confirm', name(queue), ...bindings({ events, remove, removeMasks, add, masks }))
  }

  async renameQueue(queue, to) {
    await this.request('rename --confirm', name(queue), name(to))
  }

  /** Deliveries and publishes, or one of them (publishes: 'wait' lets them wait), for some seconds or until it is resumed. */
  async pauseQueue(queue, { for: seconds, deliveries = false, publishes = false, ...strange } = {}) {
    refuse(strange)
    const flags = []
    if (seconds !== undefined) flags.push(`--for=${number(seconds, 'for')}`)
    if (deliveries) flags.push('--deliveries')
    if (publishes) flags.push(publishes === true ? '--publishes' : `--publishes=${name(publishes)}`)
    await this.request('pause --confirm', name(queue), ...flags)
  }

  async resumeQueue(queue) {
    await this.request('resume --confirm', name(queue))
  }

  async deleteQueue(queue) {
    await this.request('delete_queue --confirm', name(queue))
  }

  /** Drops all ready messages; how many. */
  async purge(queue) {
    const count = told(await this.request('purge --confirm', name(queue)))
    if (Number.isInteger(count)) return count
    throw new MqksError('PROTOCOL', 'the server told no number')
  }

  /** Facts about the server, as `stats` tells them. */
  async stats(...words) {
    return told(await this.request('stats', ...words))
  }

  /** Any other request that has one answer; `{ timeoutMs }` may stand behind its words. */
  async request(...words) {
    const { timeoutMs, ...strange } = optionsOf(words)
    refuse(strange)
    const wrong = words.find((word) => typeof word !== 'string' && !(word instanceof Uint8Array))
    if (wrong !== undefined) throw invalid(`a word of a request must be text, not ${shown(wrong)}`)
    if (words.some((word) => /[\n\t]/.test(Buffer.from(word).toString('latin1')))) throw invalid('a request must not contain a tab or a newline')
    const id = this.connection.newId()
    return (await this.ask(id, line(id, ...words.map(bytes)), { timeoutMs })).toString()
  }

  /** Ends all consumers and the connection, after the confirms of what was published. */
  close() {
    this.closing ??= this.leave()
    return this.closing
  }

  async leave() {
    await Promise.all([...this.consumers].map((each) => each.close()))
    const { connection } = this
    const id = connection.newId()
    const { isUp, hasTold } = connection
    const { closeTimeoutMs: timeoutMs } = this.options
    const isRead = !isUp || (await connection.ask(id, line(id, 'ping closing'), { timeoutMs }).then(() => true, () => false))
    connection.fail(new MqksError('CLOSED', 'the client is closed'))
    if (hasTold && !isRead) throw new MqksError('CONNECTION', 'the client ended before the server had read all published messages')
  }
}

/** Id and line of a message, and whether it is to be confirmed. */
function publishing(newId, event, data, { id = newId, confirm = true, once = confirm, ...options }) {
  const words = [id === newId ? id : name(id), 'publish']
  if (confirm) words.push('--confirm')
  if (once) words.push(once === true ? '--once' : `--once=${number(once, 'once')}`)
  return [words[0], line(...words, ...terms(event, data, options)), confirm]
}

/** The words behind `open_batch` that say what follows it. */
function following(follows) {
  if (follows === undefined) return []
  if (!Array.isArray(follows)) throw invalid(`what follows a batch is [event, data, options], not ${shown(follows)}`)
  const [event, data, options = {}] = follows
  return ['publish', ...terms(event, data, options)]
}

/** The flags of a publish, its event and its data. */
function terms(event, data, options) {
  const { mandatory, delay, at, ttl, priority, key, unique, meta, to, batch, keepResult, ...strange } = options
  refuse(strange)
  const words = []
  if (mandatory) words.push('--mandatory')
  if (delay !== undefined) words.push(`--delay=${number(delay, 'delay')}`)
  if (at !== undefined) words.push(`--at=${number(at instanceof Date ? at.getTime() / 1000 : at, 'at')}`)
  if (ttl !== undefined) words.push(`--ttl=${number(ttl, 'ttl')}`)
  if (priority !== undefined) words.push(`--priority=${number(priority, 'priority')}`)
  if (key !== undefined) words.push(`--key=${percent(key, 'key')}`)
  if (unique !== undefined) words.push(`--unique=${uniqueText(unique)}`)
  const attributes = meta === undefined ? '' : metaText(meta)
  if (attributes) words.push(`--meta=${attributes}`)
  if (to !== undefined) words.push(Buffer.concat([Buffer.from('--to='), name(to)]))
  if (batch !== undefined) words.push(Buffer.concat([Buffer.from('--batch='), name(batch)]))
  if (keepResult !== undefined) words.push(`--keep-result=${number(keepResult, 'keepResult')}`)
  const [raw, isEscaped] = published(data)
  if (isEscaped) words.push('--escaped')
  return [...words, name(event), raw]
}

/** A key, or `{ key, until, for, on }`. */
function uniqueText(unique) {
  const { key, ...options } = typeof unique === 'string' ? { key: unique } : unique
  const { until, for: seconds, on, ...strange } = options
  refuse(strange)
  const words = [percent(key, 'unique')]
  if (until !== undefined) words.push(`until=${name(until)}`)
  if (seconds !== undefined) words.push(`for=${number(seconds, 'for')}`)
  if (on !== undefined) words.push(`on=${name(on)}`)
  return words.join(',')
}

function bindings({ events, remove = [], removeMasks = [], add, masks }) {
  const words = names(events ?? [])
  for (const [flag, list] of [['--remove', remove], ['--remove-mask', removeMasks], ['--add', add], ['--add-mask', masks]]) {
    if (list.length) words.push(flag, ...names(list))
  }
  return words
}

/** What an answer of JSON says. */
function told(answer) {
  try {
    return JSON.parse(answer)
  } catch {
    throw new MqksError('PROTOCOL', `the server told no JSON: ${shown(answer.toString())}`)
  }
}

/** A client that is connected. `urls` is one URL, several with commas in between, or a list. */
async function connect(urls = process.env.MQKS_URL || `mqks://127.0.0.1:${PORT}`, options = {}) {
  const client = new Client(urls, options)
  const { connection } = client
  const { connectTimeoutMs } = client.options
  const late = after(connectTimeoutMs, () => {
    if (!connection.wasUp) connection.fail(new MqksError('CONNECTION', `not connected within ${connectTimeoutMs / 1000} s: ${connection.reason}`))
  })
  try {
    await connection.ready
  } finally {
    clearTimeout(late)
  }
  return client
}

module.exports = { connect, Batch, Client, Consumer, Job, Message, MqksError }
