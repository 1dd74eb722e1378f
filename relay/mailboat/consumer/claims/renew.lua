#!lua flags=allow-oom
-- Renews leases. KEYS: one per event. ARGV: owner, repeated (not needed here), lease in ms, ttl in s.
-- Answers per key, separated by commas: 1 renewed; 0 the claim was lost to another consumer; -1 Redis has no such key (any more).
local owner, lease, ttl = ARGV[1], tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then
    return value
  end
  local holder, history
  if type(value) == 'string' then
    holder, history = string.match(value, '^p|([^|]*)|%d+|(.*)$')
  end
  if holder == owner then
    redis.call('SET', key, 'p|' .. owner .. '|' .. (now + lease) .. '|' .. history, 'EX', ttl)
    answers[i] = 1
  else
    answers[i] = value and 0 or -1
  end
end
return table.concat(answers, ',')
