// The explorer's page. All texts are set with textContent; the server's answers are described in _explorer.py.
'use strict';

const MAX_BYTES = 20e6;  // as in _explore_server.py
const SAMPLES = ['plane', 'car', 'ship', 'truck', 'bird', 'frog'];
const RARE = 0.1;  // share of the images below which a decision is unusual
const find = id => document.getElementById(id);
let model = null;
let latest = 0;  // number of the last request: answers to earlier ones are dropped
let shown = null;
const history = [];

function make(tag, text = '', className = '') {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function draw(tag, attributes) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const differ = count => `${count} ${count === 1 ? 'differs' : 'differ'}`;
const mega = macs => macs >= 1e9 ? `${(macs / 1e9).toFixed(2)}\u00a0G` : `${(macs / 1e6).toFixed(2)}\u00a0M`;

function say(text) {
  find('message').textContent = text;
  find('message').hidden = !text;
}

async function ask(path, body) {
  let response;
  try {
    response = await fetch(path, body === undefined ? {} : {method: 'POST', body});
  } catch {
    throw new Error('The explorer does not answer. Is it still running?');
  }
  const answer = await response.json().catch(() => ({error: `Error ${response.status}.`}));
  if (!response.ok) throw new Error(answer.error[0].toUpperCase() + answer.error.slice(1));
  return answer;
}

// An image is {body, query}: an upload, or an image of the data set.
async function explore(image) {
  const number = ++latest;
  say('');
  if (image.body && image.body.size > MAX_BYTES) {
    say(`This file has ${(image.body.size / 1e6).toFixed(1)} MB; at most ${MAX_BYTES / 1e6} MB are allowed.`);
    return;
  }
  document.body.classList.add('busy');
  try {
    const answer = await ask(`/api/explore${image.query}`, image.body || '');
    if (number !== latest) return;
    history.unshift(answer);
    show(answer);
    document.body.classList.remove('busy');
    if (model.speed) return;
    answer.speed = await ask(`/api/speed${image.query}`, image.body || '');
    if (shown === answer) showSpeed(answer);
  } catch (error) {
    if (number === latest) say(error.message);
  } finally {
    if (number === latest) document.body.classList.remove('busy');
  }
}

function bar(name, value, width, first) {
  const item = make('li', '', first ? 'first' : ''), line = make('div'), track = make('i'), fill = make('b');
  line.append(make('span', name), make('span', value));
  fill.style.width = `${100 * Math.min(width, 1)}%`;
  track.append(fill);
  item.append(line, track);
  return item;
}

function thumbnail(source, lines, action) {
  const button = make('button'), image = make('img');
  button.type = 'button';
  image.alt = lines[0];
  image.onload = () => image.classList.toggle('small', image.naturalWidth < 64);
  image.src = source;
  button.append(image, ...lines.map((line, index) => make('span', line, index ? 'quiet' : '')));
  button.onclick = action;
  return button;
}

const nameOf = entry => entry.label === entry.prediction ? entry.label : `${entry.label}, not ${entry.prediction}`;

function ofDataSet(entry, ...lines) {
  return thumbnail(`/api/thumbnail?image=${entry.index}`, lines, () => {
    explore({query: `?image=${entry.index}`});
    find('message').scrollIntoView({block: 'center', behavior: 'smooth'});
  });
}

function show(answer) {
  shown = answer;
  find('result').hidden = false;
  find('seen').src = answer.seen;
  find('seen').classList.toggle('small', model.input[0] < 100);
  find('seen-text').textContent = `as the network gets it, ${model.input.join(' × ')}`
    + (answer.label ? `; label: ${answer.label}` : '');
  find('classes').replaceChildren(...answer.top.map(
    (entry, index) => bar(entry.name, percent(entry.probability, 1), entry.probability, !index)));
  const share = answer.macs / answer.dense_macs;
  find('share').textContent = percent(share);
  find('macs').replaceChildren(
    bar('this image, gates included', `${mega(answer.macs)} MACs`, share, true),
    bar('dense network', `${mega(answer.dense_macs)} MACs`, 1));
  showSpeed(answer);
  showLayers(answer);
  if (model.data) showData(answer);
  find('history').hidden = history.length < 2;
  find('seen-before').replaceChildren(...history.slice(0, 12).map(other => thumbnail(
    other.seen, [other.top[0].name, mega(other.macs), other === answer ? 'shown' : differences(other, answer)],
    () => show(other))));
}

function differences(one, other) {
  const [a, b] = [one.layers.join(''), other.layers.join('')];
  return differ([...a].filter((value, index) => value !== b[index]).length);
}

function showSpeed(answer) {
  const speed = answer.speed;
  find('speed').replaceChildren();
  find('speed-text').textContent = model.speed || 'Measuring milliseconds …';
  if (!speed) return;
  const {accelerated, dense, eager} = speed.milliseconds, slowest = Math.max(accelerated, dense ?? eager);
  const in_ms = time => `${time.toPrecision(3)}\u00a0ms`;
  find('speed').replaceChildren(bar('accelerated', in_ms(accelerated), accelerated / slowest, true));
  if (dense) find('speed').append(bar('dense network, accelerated', in_ms(dense), dense / slowest));
  const kernels = speed.isa ? `native kernels (${speed.isa})` : `${speed.backend} backend`;
  find('speed-text').textContent = `In eager torch, which computes all filters: ${in_ms(eager)}. Medians of `
    + `${speed.rounds} runs of this image in turns, float32, ${kernels}, ${speed.threads} `
    + `thread${speed.threads > 1 ? 's' : ''}.`;
}

// One strip of cells per layer. Wide layers wrap after a power of two; two of them fit beside each other.
function showLayers(answer) {
  const width = find('layers').clientWidth, widest = Math.max(...model.layers.map(layer => layer.gates));
  const pitch = width < 500 ? 10 : widest <= 64 ? 14 : 8, size = pitch - 2;
  const most = Math.min(64, 2 ** Math.floor(Math.log2(width / pitch)));
  let start = 0;
  let ran = 0;
  const strips = model.layers.map((layer, position) => {
    const open = answer.layers[position], count = open.length, columns = Math.min(count, most), first = start;
    const shares = model.data ? model.data.open_share.slice(first, first + count) : null;
    const paths = {open: '', closed: '', unusual: ''};
    for (let index = 0; index < count; index++) {
      const x = index % columns * pitch, y = Math.floor(index / columns) * pitch, isOpen = open[index] === '1';
      paths[isOpen ? 'open' : 'closed'] += `M${x} ${y}h${size}v${size}h-${size}z`;
      if (shares && (isOpen ? shares[index] : 1 - shares[index]) < RARE) {
        paths.unusual += `M${x + 2} ${y + 2}h${size - 4}v${size - 4}h-${size - 4}z`;
      }
    }
    const opened = [...open].filter(value => value === '1').length;
    const summary = `${opened} of ${count} ran`, note = make('span', summary, 'quiet');
    const [w, h] = [columns * pitch, Math.ceil(count / columns) * pitch];
    const strip = draw('svg', {width: w, height: h, viewBox: `0 0 ${w} ${h}`, role: 'img'});
    strip.setAttribute('aria-label', `${layer.name}: ${summary}`);
    for (const [name, d] of Object.entries(paths)) strip.append(draw('path', {class: name, d}));
    strip.onpointermove = strip.onpointerdown = event => {
      const box = strip.getBoundingClientRect(), scale = w / box.width;
      const column = Math.floor((event.clientX - box.left) * scale / pitch);
      const index = Math.floor((event.clientY - box.top) * scale / pitch) * columns + column;
      if (index < 0 || index >= count || column >= columns) return;
      note.textContent = `filter ${index}: ${open[index] === '1' ? 'ran' : 'skipped'}`
        + (shares ? `; runs for ${percent(shares[index])}` : '');
    };
    strip.onpointerleave = () => { note.textContent = summary; };
    const element = make('div', '', 'layer'), line = make('p');
    line.append(make('span', layer.name), note);
    element.append(line, strip);
    start += count;
    ran += opened;
    return element;
  });
  find('ran').textContent = `${ran} of ${start}, ${percent(ran / start)}`;
  find('layers').replaceChildren(...strips);
}

function showData(answer) {
  const {counts, edges, images, mean_macs, name} = model.data, highest = Math.max(...counts);
  const low = edges[0], high = edges[edges.length - 1];
  const at = Math.min(Math.max((answer.macs - low) / (high - low), 0), 1);
  const outside = answer.macs < low || answer.macs > high ? ' This is outside of their range.' : '';
  find('rank').textContent = `This image takes more MACs than ${percent(answer.share_below)} of the `
    + `${images.toLocaleString('en')} images of ${name}.${outside}`;
  const chart = draw('svg', {viewBox: `0 0 ${counts.length} 100`, preserveAspectRatio: 'none', role: 'img'});
  chart.setAttribute('aria-label', 'Histogram of MACs per image');
  counts.forEach((count, index) => {
    const height = 94 * count / highest;
    const here = !outside && index === Math.min(Math.floor(at * counts.length), counts.length - 1);
    chart.append(draw('rect', {
      x: index + 0.06, y: 100 - height, width: 0.88, height, class: here ? 'here' : ''}));
  });
  chart.append(draw('line', {x1: at * counts.length, x2: at * counts.length, y1: 0, y2: 100}));
  const axis = make('div', '', 'quiet');
  axis.append(make('span', mega(low)), make('span', `MACs per image, mean ${mega(mean_macs)}`),
    make('span', mega(high)));
  find('histogram').replaceChildren(chart, axis);
  find('neighbours').replaceChildren(...answer.neighbours.map(entry => ofDataSet(
    entry, nameOf(entry), mega(entry.macs), differ(entry.different))));
}

// Samples are drawings, rasterised here, so that they take the same way as an upload.
function rasterise(image) {
  const canvas = make('canvas');
  canvas.width = canvas.height = 256;
  canvas.getContext('2d').drawImage(image, 0, 0, 256, 256);
  return new Promise(resolve => canvas.toBlob(resolve, 'image/png'));
}

function offerSamples() {
  if (model.data) {
    find('samples-title').textContent = 'Images of the data set, from the fewest MACs to the most';
    find('samples').replaceChildren(...model.data.samples.map(entry => ofDataSet(
      entry, entry.label, mega(entry.macs))));
    return;
  }
  find('samples-title').textContent = 'Or try a drawing:';
  find('samples').replaceChildren(...SAMPLES.map(name => {
    const button = thumbnail(`/samples/${name}.svg`, [name], async () => explore(
      {query: '', body: await rasterise(button.querySelector('img'))}));
    return button;
  }));
}

function listen() {
  const drop = find('drop'), take = files => files.length && explore({query: '', body: files[0]});
  find('file').onchange = event => {
    take(event.target.files);
    event.target.value = '';  // the same file can be chosen again
  };
  document.ondragover = event => {
    event.preventDefault();
    drop.classList.add('over');
  };
  document.ondragleave = () => drop.classList.remove('over');
  document.ondrop = event => {
    event.preventDefault();
    drop.classList.remove('over');
    take(event.dataTransfer.files);
  };
  document.onpaste = event => take(event.clipboardData.files);
  let width = find('layers').clientWidth;
  window.onresize = () => {
    if (shown && find('layers').clientWidth !== width) showLayers(shown);
    width = find('layers').clientWidth;
  };
}

async function begin() {
  try {
    model = await ask('/api/model');
  } catch (error) {
    find('about').textContent = '';
    say(error.message);
    return;
  }
  const gates = model.layers.reduce((sum, layer) => sum + layer.gates, 0);
  const names = model.classes.join(', ') + (model.num_classes > model.classes.length ? ', …' : '');
  const data = model.data ? ` Data: ${model.data.name}, ${model.data.images.toLocaleString('en')} images, top-1 `
    + `${percent(model.data.top1, 1)} at ${percent(model.data.share, 1)} of the MACs.` : '';
  document.title = `${model.title}: timm-gated explorer`;
  find('about').textContent = `${model.title}: ${gates.toLocaleString('en')} gates in ${model.layers.length} modules `
    + `decide for each image which filters run. ${model.num_classes} classes: ${names}.${data}`;
  find('untrained').textContent = `Random weights (${model.untrained}): predictions and gates mean nothing.`;
  find('untrained').hidden = !model.untrained;
  find('unusual-key').hidden = !model.data;
  find('distribution').hidden = find('similar').hidden = !model.data;
  find('no-data').hidden = Boolean(model.data);
  offerSamples();
  listen();
}

begin();
