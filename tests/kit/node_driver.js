'use strict'
// Calls of the client for Node.js that come as lines of JSON: {n, on, call, given}. `on` is what the
// call is of, 0 for the module; its answer is {n, told} or {n, failed}.
const readline = require('node:readline')
const mqks = require('../../clients/node/mqks.js')

const things = [mqks]
// What a program writes in a line where another client has a call.
const loops = {
  heard: () => true,
  next: async (consumer) => (await consumer.next()).value,
  batch: async (consumer, most) => {
    const got = []
    for (let each; got.length < most && (each = await consumer.receive(got.length ? { timeoutMs: 0 } : {})); ) got.push(each)
    return got
  },
}

function given(value) {
  if (Array.isArray(value)) return value.map(given)
  if (value === null || typeof value !== 'object') return value
  if ('$bytes' in value) return Buffer.from(value.$bytes, 'base64')
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, given(each)]))
}

function told(value) {
  if (Array.isArray(value)) return value.map(told)
  if (!(value instanceof mqks.Client || value instanceof mqks.Consumer || value instanceof mqks.Message)) return value
  const thing = things.push(value) - 1
  if (!(value instanceof mqks.Message)) return { thing }
  const { event, retry, priority, key, meta } = value
  const [id, data] = [value.rawId, value.data].map((each) => each.toString('base64'))
  return { thing, id, data, event, retry, priority, key, meta, consumer: value.consumer?.id }
}

readline.createInterface({ input: process.stdin }).on('line', async (line) => {
  const { n, on, call, given: words } = JSON.parse(line)
  const answer = { n }
  try {
    const [of, all] = [things[on], given(words)]
    answer.told = told(await (loops[call] ? loops[call](of, ...all) : of[call](...all)))
  } catch (error) {
    const { code, message, errorId, reason } = error
    answer.failed = { code, message, errorId, reason }
  }
  process.stdout.write(JSON.stringify(answer) + '\n')
})
