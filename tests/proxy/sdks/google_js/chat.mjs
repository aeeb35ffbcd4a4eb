// A streamed chat with a function, in three calls, by Google's client of the package that is named.
// Prints what it makes of each answer, or that it threw, as JSON.
// Usage: chat.mjs PACKAGE URL
const [name, baseUrl] = process.argv.slice(2);
const { GoogleGenAI } = await import(name);
const parameters = { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] };
const shell = { name: 'shell', description: 'run a command', parametersJsonSchema: parameters };
const client = new GoogleGenAI({ apiKey: 'agent', httpOptions: { baseUrl } });
const config = { tools: [{ functionDeclarations: [shell] }], thinkingConfig: { includeThoughts: true } };
const chat = client.chats.create({ model: 'tiny', config });
const said = [];
const ask = async (message) => {
  const parts = [];
  for await (const chunk of await chat.sendMessageStream({ message })) {
    parts.push(...(chunk.candidates?.[0]?.content?.parts ?? []));
  }
  said.push(parts.map((part) => (part.thought ? '' : (part.text ?? ''))).join(''));
  return parts.flatMap(({ functionCall: call }) => (call ? [call] : []));
};
try {
  const calls = await ask('list');
  await ask(calls.map(({ name, args }) => ({ functionResponse: { name, response: { result: `ran ${args.command}` } } })));
  await ask('and now?');
} catch {
  said.push('error');
}
console.log(JSON.stringify(said));
