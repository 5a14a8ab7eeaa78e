/// <reference types="node" />
import type { ConnectionOptions } from 'node:tls'

/** Bytes are sent as they are, everything else as JSON. */
export type Data = string | ArrayBufferView | ArrayBuffer | SharedArrayBuffer | object | number | boolean | null
export type Name = string | Uint8Array
/**
 * - REFUSED: by the server; `errorId` is in its log. AUTH: it wants other credentials, or some.
 * - REPLACED: another connection consumes under the id of this consumer, which has ended.
 * - UNSENT: not sent, since there was no room or connection in time, or too much waits already.
 * - TIMEOUT: no answer in time; it may have been executed.
 * - CONNECTION: no server is reached. PROTOCOL: the peer is no MQKS server. CLOSED: by this program.
 * - CANCELLED: somebody has cancelled the message, with this `reason`. NO_RESULT: a job has ended without one.
 *
 * What can't be right is not sent: a TypeError with the code INVALID.
 */
export type Code = 'REFUSED' | 'AUTH' | 'REPLACED' | 'UNSENT' | 'TIMEOUT' | 'CONNECTION' | 'PROTOCOL' | 'CLOSED' | 'CANCELLED' | 'NO_RESULT'

export class MqksError extends Error {
  readonly code: Code
  readonly errorId?: string
  /** Why the server has refused it, unless it does not tell. */
  readonly reason?: string
}

/** Times of 2 ** 31 ms or more have no end. */
export interface Options {
  /** Of a request, reconnects included; 30,000. */
  timeoutMs?: number
  /** Until a server has answered the first line: of `connect`, and of each later attempt; 10,000. */
  connectTimeoutMs?: number
  /** Whether failed attempts of the first connection are repeated within that time; true. */
  connectAgain?: boolean
  /** For what is in flight when a consumer or the client is closed; 5,000. */
  closeTimeoutMs?: number
  /** Silence after which the server is pinged, and after another the connection is lost; 15,000. */
  keepAliveMs?: number
  reconnectMinMs?: number
  reconnectMaxMs?: number
  /** Requests without an answer; a further one waits. 10,000, and 16 MiB. */
  inFlightMax?: number
  inFlightBytesMax?: number
  /** Requests that wait, in their order; a further one is UNSENT. 250,000, and 256 MiB. */
  waitingMax?: number
  waitingBytesMax?: number
  /** Messages of a consumer that are not handled yet, above which it is not read; 1 MiB. */
  bufferBytesMax?: number
  /** As the server's `line_bytes_max`; 1 MiB. */
  lineBytesMax?: number
  replyBytesMax?: number
  /** Of the client, in the server's log and lists. */
  name?: string
  /** For mqkss://, such as `{ ca }`. */
  tls?: ConnectionOptions
}

export interface PublishOptions {
  id?: Name
  /** Wait until the server has stored it; true. False: until it is written to a connection. */
  confirm?: boolean
  /** Drop the message if its id was already published, ever or for so many seconds; as `confirm`. */
  once?: boolean | number
  /** An error where no queue is bound to the event. */
  mandatory?: boolean
  /** Seconds. */
  delay?: number
  /** Seconds since 1970, or a Date. */
  at?: number | Date
  /** Seconds. */
  ttl?: number
  priority?: number
  key?: string
  /** While a message of this key waits in a queue, drop this one, or replace that one. */
  unique?: string | { key: string; until?: 'delivered' | 'acked'; for?: number; on?: 'drop' | 'replace' }
  meta?: Record<string, string>
  /** To this queue alone. */
  to?: Name
  /** The batch that it joins. */
  batch?: Name
  /** Seconds after its end, until which the server keeps what became of it; see `submit`. */
  keepResult?: number
  timeoutMs?: number
}

export interface ConsumeOptions {
  add?: Name[]
  masks?: Name[]
  /** A message is removed when it is delivered; false. */
  autoAck?: boolean
  /** Unacked messages; 0 for as many as the server allows. 100. */
  prefetch?: number
  /** Seconds. */
  ackTimeout?: number
  /** Seconds: the first, or first and longest. */
  backoff?: number | [number, number]
  /** Delete the queue without consumers, at once or after seconds. */
  deleteWhenUnused?: boolean | number
  /** It is told which of its messages are cancelled: `message.signal`. */
  cancellable?: boolean
  /** A missing queue is an error. */
  existing?: boolean
  /** Leave an existing queue as it is; true where no event and no mask is named. */
  keep?: boolean
  /** Until it has started; as that of the client. */
  timeoutMs?: number
}

export interface Confirm {
  /** Wait until the server has stored it; false. */
  confirm?: boolean
  /** For the confirm; as that of the client. */
  timeoutMs?: number
}

export class Message {
  readonly id: string
  readonly rawId: Buffer
  readonly event: string
  readonly data: Buffer
  readonly text: string
  /** Deliveries that were rejected or lost before. */
  readonly retry: number
  readonly priority: number
  readonly key?: string
  readonly unique?: string
  readonly meta: Record<string, string>
  /** Of peeked messages only. */
  readonly seq?: number
  readonly time?: Date
  /** Somebody keeps its result. */
  readonly wantsResult: boolean
  /** Aborted when somebody cancels it, with an MqksError CANCELLED; of a `cancellable` consumer. */
  readonly signal: AbortSignal
  readonly cancelReason?: string
  json(): any
  /**
   * Each of these: whether the server was told or, with `confirm`, has stored it. False when the
   * connection of the delivery was lost: the message is delivered again.
   */
  /** `result` is written as JSON; it is an error if there is no room for it. */
  ack(options?: Confirm & { result?: unknown }): Promise<boolean>
  /** From 0 to 100; of the text at most 200 bytes. Restarts the ack timeout. */
  progress(percent: number, text?: string, options?: Confirm): Promise<boolean>
  reject(options?: Confirm & { dead?: boolean; delay?: number; reason?: string }): Promise<boolean>
  release(options?: Confirm & { delay?: number }): Promise<boolean>
  touch(options?: Confirm & { for?: number }): Promise<boolean>
}

export class Consumer implements AsyncIterableIterator<Message> {
  /** The next message; undefined after `timeoutMs` without one, or when it is closed. */
  receive(options?: { timeoutMs?: number }): Promise<Message | undefined>
  /**
   * Calls the handler for each message, `concurrency` (1) at a time, until the consumer is closed.
   * A message is acked when its handler has ended, with what that returned if it `wantsResult`, and
   * rejected when it throws. One that was cancelled is acked also then; before
   * its turn, without a call.
   */
  handle(handler: (message: Message, context: { signal: AbortSignal }) => unknown, options?: { concurrency?: number }): Promise<void>
  next(): Promise<IteratorResult<Message, undefined>>
  return(): Promise<IteratorResult<Message, undefined>>
  [Symbol.asyncIterator](): this
  /** Ends it behind all acks; what is unacked goes back to the queue. */
  close(options?: { timeoutMs?: number }): Promise<void>
}

export interface JobState {
  state: 'waiting' | 'running' | 'done' | 'dead' | 'cancelled' | 'gone' | 'none'
  hasEnded: boolean
  /** Where it is, or has ended. */
  queue?: string
  /** Percent, and what was told with it. */
  progress?: number
  text?: string
  /** The result, as it was sent. */
  data?: Buffer
  /** Why it is dead or was cancelled. */
  reason?: string
}

/** A message whose end is known. */
export class Job {
  readonly id: string
  /** With `waitMs`, at most 60,000, not before its end or this time. */
  state(options?: { waitMs?: number; timeoutMs?: number }): Promise<JobState>
  progress(options?: { timeoutMs?: number }): Promise<number | undefined>
  /** Read from JSON; undefined if it was acked without one. NO_RESULT, or TIMEOUT. */
  result(options?: { timeoutMs?: number }): Promise<any>
  cancel(options?: { reason?: string; timeoutMs?: number }): Promise<Cancelled>
}

/**
 * - cancelled: it has waited, and is removed. told: a consumer holds it, and was told.
 * - held: a consumer holds it that was not told. none: it is not there.
 */
export type Cancelled = 'cancelled' | 'told' | 'held' | 'none'

/** What is published when a batch ends: event, data, and options of `publish`. */
export type Follows = [Name, Data] | [Name, Data, Omit<PublishOptions, 'id' | 'confirm' | 'once' | 'batch' | 'timeoutMs'>]

export interface BatchCounts {
  name: string
  total: number
  waiting: number
  running: number
  done: number
  dead: number
  closed: boolean
  /** Events of what follows. */
  then: string | null
  on_dead: string | null
  /** Microseconds since 1970. */
  opened_us: number
  expires_us: number
}

export class Batch {
  readonly name: Name
  publish(event: Name, data: Data, options?: PublishOptions): Promise<string>
  /** It ends when all of its messages are done; with `discard` it is forgotten. Whether there was one. */
  close(options?: { discard?: boolean; timeoutMs?: number }): Promise<boolean>
  /** Undefined if there is none, as after its end. */
  counts(options?: { timeoutMs?: number }): Promise<BatchCounts | undefined>
  /** Until it has ended: it is asked for every second at least. TIMEOUT. */
  wait(options?: { timeoutMs?: number }): Promise<void>
}

export class Client {
  publish(event: Name, data: Data, options?: PublishOptions): Promise<string>
  /** `duplicateOf`: the id of the message that keeps it out; `replaced`: of that whose place it has. */
  publishUnique(event: Name, data: Data, unique: NonNullable<PublishOptions['unique']>, options?: PublishOptions): Promise<{ id: string; duplicateOf?: string; replaced?: string }>
  /** Publishes a message whose end is known until `keepResult` (3,600) seconds after it. */
  submit(event: Name, data: Data, options?: Omit<PublishOptions, 'confirm' | 'unique' | 'batch'>): Promise<Job>
  job(id: string): Job
  cancelJob(queue: Name, id: Name, options?: { reason?: string; timeoutMs?: number }): Promise<Cancelled>
  /** Opens a batch, or sets what follows one that is open: `then`, or `onDead` if a message has died. `for`: seconds until it expires. */
  openBatch(batch?: Name, options?: { then?: Follows; onDead?: Follows; for?: number; timeoutMs?: number }): Promise<Batch>
  batch(batch: Name): Batch
  closeBatch(batch: Name, options?: { discard?: boolean; timeoutMs?: number }): Promise<boolean>
  batchCounts(batch: Name, options?: { timeoutMs?: number }): Promise<BatchCounts | undefined>
  batches(): Promise<BatchCounts[]>
  /** Naming events replaces all bindings of the queue. */
  consume(queue: Name, options?: ConsumeOptions): Promise<Consumer>
  consume(queue: Name, events: Name[], options?: ConsumeOptions): Promise<Consumer>
  /**
   * One message of an existing queue, acked; undefined after `timeoutMs` (1,000) without one. TIMEOUT
   * when the server does not answer for as long, and for at least a second.
   */
  get(queue: Name, options?: { timeoutMs?: number }): Promise<Message | undefined>
  peek(queue: Name, options?: { limit?: number; after?: number; scheduled?: boolean; soonest?: boolean }): Promise<Message[]>
  /** As the flags of `set_queue`: `{ retries: 5, backoff: [1, 60], deadLetters: 'jobs.dead', ttl: null }`. */
  setQueue(queue: Name, policy?: Record<string, number | string | boolean | null | number[]>): Promise<void>
  subscribe(queue: Name, events?: Name[], options?: { add?: Name[]; masks?: Name[] }): Promise<void>
  /** With `events`, even none, they and `masks` replace all bindings. */
  rebind(queue: Name, changes?: { events?: Name[]; remove?: Name[]; removeMasks?: Name[]; add?: Name[]; masks?: Name[] }): Promise<void>
  renameQueue(queue: Name, to: Name): Promise<void>
  /** Deliveries, publishes (they are refused, or `wait`), or, with neither flag, both; `for` some seconds or until it is resumed. */
  pauseQueue(queue: Name, options?: { for?: number; deliveries?: boolean; publishes?: boolean | 'wait' }): Promise<void>
  resumeQueue(queue: Name): Promise<void>
  deleteQueue(queue: Name): Promise<void>
  purge(queue: Name): Promise<number>
  stats(...words: string[]): Promise<any>
  /** Any other request with one answer; `{ timeoutMs }` may stand behind its words. */
  request(...words: (Name | { timeoutMs?: number })[]): Promise<string>
  /** The reason of an error, if the server still has it. */
  reason(errorId: string, options?: { timeoutMs?: number }): Promise<string | undefined>
  /** Ends consumers and connection. Rejects if it is unknown whether publishes without confirm were read. */
  close(): Promise<void>
}

/** Rejects after `connectTimeoutMs` without a server. */
export function connect(urls?: string | string[], options?: Options): Promise<Client>
