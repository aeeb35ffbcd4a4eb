// Asks for an answer with a client of Node.js whose read timeout is short, and prints the text of the answer.
// Usage: node_waits.mjs URL CLIENT SECONDS REPEATS
import http from 'node:http';

const [url, client, seconds, repeats] = process.argv.slice(2);
const timeout = 1000 * Number(seconds);
const body = JSON.stringify({ model: 'm', messages: [{ role: 'user', content: 'hi' }] });
const headers = { Authorization: 'Bearer agent', 'Content-Type': 'application/json' };
const target = `${url}/v1/chat/completions`;

const byHttp = () =>
  new Promise((resolve, reject) => {
    const request = http.request(target, { method: 'POST', headers, timeout }, (answer) => {
      let text = '';
      answer.on('data', (part) => (text += part));
      answer.on('end', () => resolve(text));
      answer.on('error', reject);
    });
    request.on('timeout', () => request.destroy(new Error('no byte in time')));
    request.on('error', reject);
    request.end(body);
  });

// Node.js gives no name to the class that holds the timeouts of fetch, only to the present instance.
await fetch('data:,').then((answer) => answer.text());
const Agent = globalThis[Symbol.for('undici.globalDispatcher.1')].constructor;
const dispatcher = new Agent({ headersTimeout: timeout, bodyTimeout: timeout });
const byFetch = async () => (await fetch(target, { method: 'POST', headers, body, dispatcher })).text();

for (let failed = 0; ; failed += 1) {
  try {
    const answer = JSON.parse(await (client === 'http' ? byHttp() : byFetch()));
    console.log(answer.choices[0].message.content);
    process.exit();
  } catch (error) {
    if (failed === Number(repeats)) throw error;
  }
}
