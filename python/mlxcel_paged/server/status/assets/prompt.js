// The box to try a prompt: streams an answer and shows it as plain text.

import { count, latency, rate } from "./format.js";

export class PromptBox {
  #running = null;
  #ready = false;

  // headers() gives the headers of a request; onKeyWanted() is called when the server asks for a key.
  constructor({ headers, onKeyWanted }) {
    this.headers = headers;
    this.onKeyWanted = onKeyWanted;
    this.form = document.getElementById("prompt-form");
    this.prompt = document.getElementById("prompt");
    this.send = document.getElementById("send");
    this.stop = document.getElementById("stop");
    this.answer = document.getElementById("answer");
    this.outcome = document.getElementById("outcome");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.send.disabled) this.#run();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.#running?.abort());
    this.#show();
  }

  setReady(ready) {
    this.#ready = ready;
    this.#show();
  }

  #show() {
    this.send.disabled = !this.#ready || this.#running !== null;
    this.stop.disabled = this.#running === null;
    this.answer.setAttribute("aria-busy", String(this.#running !== null));
  }

  #tell(text, kind = "") {
    this.outcome.dataset.kind = kind;
    this.outcome.textContent = text;
  }

  #request() {
    const text = this.prompt.value;
    const isChat = document.getElementById("mode").value === "chat";
    const body = {
      max_tokens: Number(document.getElementById("max-tokens").value),
      temperature: Number(document.getElementById("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
      ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    };
    return [isChat ? "v1/chat/completions" : "v1/completions", body];
  }

  async #run() {
    const running = (this.#running = new AbortController());
    const shown = new Text("");
    this.answer.replaceChildren(shown);
    this.#tell("waiting for the first token");
    this.#show();
    const measured = { sentAt: performance.now(), firstAt: null, lastAt: null, usage: null };
    try {
      const [url, body] = this.#request();
      const response = await fetch(url, {
        method: "POST",
        headers: { "content-type": "application/json", ...this.headers() },
        body: JSON.stringify(body),
        signal: running.signal,
      });
      if (response.status === 401) this.onKeyWanted();
      if (!response.ok) throw new Error(await errorText(response));
      await this.#read(response, shown, measured);
      this.#tell(summary(measured));
    } catch (error) {
      if (running.signal.aborted) this.#tell("stopped");
      else this.#tell(error instanceof TypeError ? "the server cannot be reached" : error.message, "error");
    } finally {
      this.#running = null;
      this.#show();
    }
  }

  async #read(response, shown, measured) {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) measured.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (!text) continue;
      measured.lastAt = performance.now();
      if (measured.firstAt === null) {
        measured.firstAt = measured.lastAt;
        this.#tell("answering");
      }
      const atEnd = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 40;
      shown.appendData(text);
      if (atEnd) this.answer.scrollTop = this.answer.scrollHeight;
    }
    throw new Error("the connection broke off before the answer was complete");
  }
}

// The data of each server-sent event of a body.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (buffered + value).split("\n\n");
    buffered = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function summary({ sentAt, firstAt, lastAt, usage }) {
  if (!usage || firstAt === null) return "the answer is empty";
  const tokens = usage.completion_tokens;
  const parts = [`${count(usage.prompt_tokens)} + ${count(tokens)} tokens`, `first after ${latency((firstAt - sentAt) / 1e3)}`];
  if (tokens > 1 && lastAt > firstAt) parts.push(`${rate(((tokens - 1) * 1e3) / (lastAt - firstAt))} tokens/s`);
  return parts.join(", ");
}
