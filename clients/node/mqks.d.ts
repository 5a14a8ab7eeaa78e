/// <reference types="node" />
import type { ConnectionOptions } from 'node:tls'

export type Data = string | Uint8Array | object | number | boolean | null
export type Name = string | Uint8Array
/** INVALID: not sent, because it can't be right. REFUSED: `errorId` is in the server's log. TIMEOUT: it may have been executed. */
export type Code = 'INVALID' | 'REFUSED' | 'AUTH' | 'TIMEOUT' | 'CONNECTION' | 'PROTOCOL' | 'LOST' | 'CLOSED'

export class MqksError extends Error {
  readonly code: Code
  readonly errorId?: string
}

export interface Options {
  /** Of a request, reconnects included; 30,000. */
  timeoutMs?: number
  /** Until a server has answered the first line; 10,000. */
  connectTimeoutMs?: number
  /** Whether the first connection is tried again until it succeeds; true. */
  connectAgain?: boolean
  /** Silence after which the server is pinged, and after another the connection is lost; 15,000. */
  keepAliveMs?: number
  reconnectMinMs?: number
  reconnectMaxMs?: number
  /** Requests without an answer; a further one waits. 10,000, and 16 MiB. */
  inFlightMax?: number
  inFlightBytesMax?: number
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
  /** Wait until the server has stored it; true. */
  confirm?: boolean
  /** Drop the message if its id was already published; as `confirm`. */
  once?: boolean
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
  meta?: Record<string, string>
  /** To this queue alone. */
  to?: Name
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
  /** A missing queue is an error. */
  existing?: boolean
  /** Leave an existing queue as it is; true where no event and no mask is named. */
  keep?: boolean
}

export interface Confirm {
  /** Wait until the server has stored it; false. */
  confirm?: boolean
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
  readonly meta: Record<string, string>
  /** Of peeked messages only. */
  readonly seq?: number
  readonly time?: Date
  json(): any
  /** Each of these: whether the server was told. After a reconnect the message is someone else's. */
  ack(options?: Confirm): Promise<boolean>
  reject(options?: Confirm & { dead?: boolean; delay?: number; reason?: string }): Promise<boolean>
  release(options?: Confirm & { delay?: number }): Promise<boolean>
  touch(options?: Confirm & { for?: number }): Promise<boolean>
}

export class Consumer implements AsyncIterableIterator<Message> {
  /** The next message; undefined after `timeoutMs` without one, or when it is closed. */
  receive(options?: { timeoutMs?: number }): Promise<Message | undefined>
  next(): Promise<IteratorResult<Message, undefined>>
  return(): Promise<IteratorResult<Message, undefined>>
  [Symbol.asyncIterator](): this
  close(): Promise<void>
}

export class Client {
  publish(event: Name, data: Data, options?: PublishOptions): Promise<string>
  /** Naming events replaces all bindings of the queue. */
  consume(queue: Name, options?: ConsumeOptions): Promise<Consumer>
  consume(queue: Name, events: Name[], options?: ConsumeOptions): Promise<Consumer>
  get(queue: Name, options?: { timeoutMs?: number }): Promise<Message | undefined>
  peek(queue: Name, options?: { limit?: number; after?: number; scheduled?: boolean }): Promise<Message[]>
  /** As the flags of `set_queue`: `{ retries: 5, backoff: [1, 60], deadLetters: 'jobs.dead', ttl: null }`. */
  setQueue(queue: Name, policy?: Record<string, number | string | boolean | null | number[]>): Promise<void>
  subscribe(queue: Name, events?: Name[], options?: { add?: Name[]; masks?: Name[] }): Promise<void>
  /** With `events`, even none, they and `masks` replace all bindings. */
  rebind(queue: Name, changes?: { events?: Name[]; remove?: Name[]; removeMasks?: Name[]; add?: Name[]; masks?: Name[] }): Promise<void>
  deleteQueue(queue: Name): Promise<void>
  purge(queue: Name): Promise<number>
  stats(...words: string[]): Promise<any>
  request(...words: Name[]): Promise<string>
  close(): Promise<void>
}

export function connect(urls?: string | string[], options?: Options): Promise<Client>
