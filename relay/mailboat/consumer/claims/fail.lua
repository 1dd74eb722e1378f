#!lua flags=allow-oom
-- Gives claims back. KEYS: one per event. ARGV: owner, '1' if the call is repeated, ttl in s, then per key: ms until the next
-- attempt, and '1' if this attempt counts, else '0'. Answers per key, separated by commas: 1, or 0 if the claim was lost to another consumer.
local owner, again, ttl = ARGV[1], ARGV[2] == '1', ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i, key in ipairs(KEYS) do
  local delay, counted = tonumber(ARGV[2 + 2 * i]), ARGV[3 + 2 * i] == '1'
  local value = redis.pcall('GET', key)
  if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then
    return value
  end
  local state, holder, tries, died
  if type(value) == 'string' then
    state, holder, tries, died = string.match(value, '^([pf])|([^|]*)|%d+|(%d+)|?(%d*)$')
  end
  if state == 'p' and holder == owner then
    local attempts = tonumber(tries) - (counted and 0 or 1)
    local deaths = tonumber(died) or 0
    if attempts == 0 and delay == 0 then
      redis.call('DEL', key)
    else
      local history = attempts .. (deaths > 0 and '|' .. deaths or '')
      redis.call('SET', key, 'f||' .. (now + delay) .. '|' .. history, 'EX', ttl)
    end
    answers[i] = 1
  else
    answers[i] = (again and (not value or state == 'f')) and 1 or 0
  end
end
return table.concat(answers, ',')
